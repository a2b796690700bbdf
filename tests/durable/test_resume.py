"""Stopped or killed at every step, a run goes on to the bit and is never charged less."""

from __future__ import annotations

import os
import stat
import warnings

import pytest
import torch
from resumable import DELTA, STEPS, Run

from dpivon import ArgumentError, Checkpoints, PrivacyEngine, PrivacyError, PrivacyWarning, budget
from dpivon.durable.ledger import read
from dpivon.errors import DpivonError
from dpivon.privacy.accounting.recorded import drawn
from dpivon.privacy.noise import SecureNoise
from dpivon.privacy.resume import repeatable


def spent(releases, sigma=1.0):
    return budget(dataset_size=40, batch_size=8, steps=releases, delta=DELTA, noise_multiplier=sigma).epsilon


@pytest.fixture(scope="module", params=["ivon", "adam"])
def method(request):
    return request.param


@pytest.fixture(scope="module")
def whole(method, tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("whole"), method).train()
    assert len(run.released) == STEPS
    return run


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("k", range(1, STEPS + 1))
def test_stopped_and_resumed_at_every_step_nothing_differs(whole, method, tmp_path, k):
    first = Run(tmp_path, method).train(stop_at=k)
    first.kept.save()
    first.close()
    second = Run(tmp_path, method).train()
    assert torch.equal(torch.stack(first.released + second.released), torch.stack(whole.released))
    assert torch.equal(second.weights, whole.weights)
    assert second.epsilon == whole.epsilon == spent(STEPS)
    for p, q in zip(second.optimizer.state.values(), whole.optimizer.state.values(), strict=True):
        assert p.keys() == q.keys()
        assert all(torch.equal(torch.as_tensor(p[name]), torch.as_tensor(q[name])) for name in p)


@pytest.mark.campaign(keep=6)
@pytest.mark.parametrize("k", range(1, STEPS + 1))
def test_killed_at_every_step_lost_releases_are_repeated_to_the_bit_at_no_cost(whole, method, tmp_path, k):
    first = Run(tmp_path, method).train(stop_at=k, save_every=3)
    first.close()
    second = Run(tmp_path, method)
    second.train()
    assert second.kept._journal.replayed == k % 3
    assert torch.equal(second.weights, whole.weights)
    assert second.epsilon == whole.epsilon
    assert read(tmp_path / "ledger.jsonl").releases == STEPS


@pytest.mark.parametrize("k", [2, 5, 7])
def test_a_loader_with_a_generator_of_its_own_goes_on_too(tmp_path, k):
    """The loader seeds its workers from the generator that also draws the batches."""
    whole = Run(tmp_path / "a", "adam", own_generator=True).train()
    first = Run(tmp_path / "b", "adam", own_generator=True).train(stop_at=k)
    first.kept.save()
    first.close()
    second = Run(tmp_path / "b", "adam", own_generator=True).train()
    assert torch.equal(second.weights, whole.weights)


def test_a_ledger_elsewhere_is_refused(tmp_path):
    run = Run(tmp_path / "a", "adam")
    with pytest.raises(ArgumentError, match="its ledger is not in the folder"):
        Checkpoints(tmp_path / "b", engine=run.engine, optimizer=run.optimizer, data_loader=run.loader)
    with pytest.raises(ArgumentError, match="make_private returned"):
        Checkpoints(tmp_path / "b", engine=run.engine, optimizer=run.optimizer, data_loader=[])


@pytest.mark.campaign(keep=4)
@pytest.mark.parametrize("calls", [1, 4, 7, 11, 16])
def test_stopped_in_the_middle_of_a_logical_batch(tmp_path, method, calls):
    whole = Run(tmp_path / "a", method, micro=3).train()
    middle = Run(tmp_path / "c", method, micro=3)
    stopped = {}

    def save_in_the_middle(x, y, step=middle.step):
        step(x, y)
        stopped["calls"] = stopped.get("calls", 0) + 1
        if stopped["calls"] == calls:
            middle.kept.save()
            stopped["made"] = len(middle.released)
            raise KeyboardInterrupt

    middle.step = save_in_the_middle
    with pytest.raises(KeyboardInterrupt):
        middle.train()
    middle.close()
    second = Run(tmp_path / "c", method, micro=3).train()
    assert torch.equal(torch.stack(middle.released[: stopped["made"]] + second.released), torch.stack(whole.released))
    assert torch.equal(second.weights, whole.weights)
    assert second.epsilon == whole.epsilon


def test_a_step_that_does_not_repeat_is_dropped_and_all_is_new_from_there(whole, method, tmp_path):
    first = Run(tmp_path, method).train(stop_at=6, save_every=3)
    first.train(stop_at=2, resume=False)  # in the second pass
    made = len(first.released)
    first.close()
    second = Run(tmp_path, method)
    torch.nn.init.zeros_(second.net[0].bias)
    restore = second.kept.restore

    def tampered():
        found = restore()
        with torch.no_grad():
            second.net[0].bias[0] += 1e-6  # another machine, another rounding
        return found

    second.kept.restore = tampered
    with pytest.warns(PrivacyWarning, match="not the one that was lost"):
        second.train()
    assert read(tmp_path / "ledger.jsonl").releases == made + len(second.released)
    assert second.epsilon == spent(made + len(second.released))
    before = {float(v) for release in first.released for v in release}
    assert not before & {float(v) for release in second.released for v in release}


def test_the_same_noise_never_meets_two_sums(tmp_path):
    """Same seed in both processes, no checkpoint: the noise of the second is not the first's."""
    noises = []
    for _ in range(2):
        run = Run(tmp_path, "adam")
        normal = run.optimizer.noise.normal
        drawn = []
        run.optimizer.noise.normal = lambda like, std, normal=normal, drawn=drawn: (
            drawn.append(normal(like, std)) or drawn[-1]
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)
            run.train(stop_at=4)
        run.close()
        for path in tmp_path.glob("release-*"):
            path.unlink()
        noises.append(torch.cat([d.flatten() for d in drawn]))
    assert not set(noises[0].tolist()) & set(noises[1].tolist())


def test_without_a_checkpoint_all_is_charged_and_nothing_is_drawn_again(whole, method, tmp_path):
    first = Run(tmp_path, method).train(stop_at=2)
    first.close()
    for path in tmp_path.glob("release-*"):
        path.unlink()
    second = Run(tmp_path, method)
    with pytest.warns(PrivacyWarning, match=r"2 releases were made and lost.*stay charged"):
        second.train()
    assert second.epsilon == spent(2 + STEPS)
    assert not set(map(float, torch.stack(second.released).flatten())) & set(map(float, whole.released[0]))


def test_secure_noise_is_always_new_and_what_was_lost_stays_charged(tmp_path):
    first = Run(tmp_path, "adam", secure_mode=True).train(stop_at=5, save_every=3)
    first.close()
    second = Run(tmp_path, "adam", secure_mode=True)
    with pytest.warns(PrivacyWarning, match=r"2 releases were made and lost.*cannot be repeated"):
        second.train()
    assert second.epsilon == spent(5 + 7)


def test_on_a_device_nothing_is_repeated(tmp_path):
    """Sums there differ in their last bits from run to run; the noise of a lost release must not meet another sum."""
    run = Run(tmp_path, "adam")
    noise, params = run.optimizer.noise, run.optimizer.params
    assert repeatable(noise, params)
    assert not repeatable(noise, [*params, torch.zeros(2, device="meta")])  # stands for any other device
    assert not repeatable(SecureNoise(), params)
    run.close()


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("k", [2, 4])
def test_who_drew_is_remembered_with_the_generators(tmp_path, monkeypatch, seeded, k):
    """The terms of a lost release say who drew its noise: without it none would ever be the same again."""
    if seeded:
        monkeypatch.setattr(
            "resumable.PrivacyEngine", lambda **o: PrivacyEngine(generator=torch.Generator().manual_seed(5), **o)
        )
    first = Run(tmp_path, "adam").train(stop_at=k, save_every=3)
    first.close()
    monkeypatch.undo()
    second = Run(tmp_path, "adam").train()  # whatever this process would have drawn from
    assert second.kept._journal.replayed == k % 3
    words = "seeded" if seeded else "os-entropy"
    assert drawn(read(tmp_path / "ledger.jsonl"), 0) == {f"noise {words}, batches {words}": STEPS}


def test_with_workers_a_resume_makes_the_remaining_steps_with_new_noise(tmp_path):
    first = Run(tmp_path, "adam", workers=1).train(stop_at=3)
    first.kept.save()
    first.close()
    second = Run(tmp_path, "adam", workers=1).train()
    assert len(second.released) == STEPS - 3
    assert second.epsilon == spent(STEPS)


def test_an_old_checkpoint_never_takes_releases_back(tmp_path):
    first = Run(tmp_path, "adam").train(stop_at=3)
    first.kept.save()
    first.train(stop_at=2, resume=False)
    newest = first.kept.save()
    first.close()
    newest.unlink()
    second = Run(tmp_path, "adam")
    resumed = second.kept.restore()
    assert (resumed.steps, resumed.lost) == (3, 2)
    assert second.epsilon == spent(5)


def test_resuming_something_else_is_refused(tmp_path):
    first = Run(tmp_path, "adam", config={"lr": 1}).train(stop_at=2)
    first.kept.save()
    first.close()
    for options, words in (
        ({"config": {"lr": 2}}, r"config=\{'lr': 2\}.*begun with \{'lr': 1\}"),
        ({"sigma": 2.0, "config": {"lr": 1}}, r"noise_multiplier=2.0.*begun with 1.0"),
        ({"change_data": 3, "config": {"lr": 1}}, "other data"),
        ({"also": {"scheduler": None}, "config": {"lr": 1}}, "also"),
    ):
        run = Run(tmp_path, "adam", **options)
        with pytest.raises(ArgumentError, match=words):
            run.kept.restore()
        run.close()
    with pytest.raises(ArgumentError, match="optimizer='IVON'"):
        (run := Run(tmp_path, "ivon", config={"lr": 1})).kept.restore()
    run.close()


def test_a_cut_or_foreign_ledger_is_refused(tmp_path):
    first = Run(tmp_path, "adam").train(stop_at=4)
    first.kept.save()
    first.close()
    ledger = tmp_path / "ledger.jsonl"
    whole = ledger.read_bytes()
    ledger.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))  # a line less, and every checksum in order
    run = Run(tmp_path, "adam")
    with pytest.raises(PrivacyError, match=r"3 releases of a kind of which the checkpoint knows 4"):
        run.kept.restore()
    run.close()
    ledger.unlink()
    run = Run(tmp_path, "adam")
    with pytest.raises(PrivacyError, match="not the ledger of this run"):
        run.kept.restore()
    run.close()


def test_damaged_checkpoints_are_named_and_the_one_before_is_used(whole, method, tmp_path):
    first = Run(tmp_path, method).train(stop_at=6, save_every=2)
    first.close()
    files = sorted(tmp_path.glob("release-*.safetensors"))
    assert [int(f.name[8:20]) for f in files] == [4, 6]  # two are kept
    content = bytearray(files[-1].read_bytes())
    content[len(content) // 2] ^= 1
    files[-1].write_bytes(content)
    second = Run(tmp_path, method)
    with pytest.warns(UserWarning, match=rf"{files[-1].name}.*Going on from the one before it.*{files[0].name}"):
        second.train()
    assert second.kept._journal.replayed == 2
    assert torch.equal(second.weights, whole.weights)
    assert second.epsilon == whole.epsilon
    second.close()
    for f in tmp_path.glob("release-*"):
        f.write_bytes(f.read_bytes()[:-3])
    with pytest.raises(DpivonError, match="not one of its"):
        (run := Run(tmp_path, method)).kept.restore()
    run.close()


def test_checkpoints_are_secret_and_hold_no_raw_gradient(tmp_path):
    run = Run(tmp_path, "adam", micro=3)
    path = {}

    def save(x, y, step=run.step):
        step(x, y)
        sums = [p.summed_grad for p in run.net.parameters()]
        if run.optimizer._is_last_step_skipped:
            path["file"], path["sums"] = run.kept.save(), [s.clone() for s in sums]
            raise KeyboardInterrupt

    run.step = save
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert stat.S_IMODE(os.stat(path["file"]).st_mode) == 0o600
    content = path["file"].read_bytes()
    assert b'"secret":"holds the state of noise generators' in content
    for total in path["sums"]:
        assert total.abs().sum() > 0
        assert total.numpy().tobytes() not in content
        assert total.float().numpy().tobytes() not in content
