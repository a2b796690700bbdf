"""Stacks on disk: restored to the bit, and never charged less for having been killed."""

from __future__ import annotations

import json
import os
import shutil
import stat
from dataclasses import replace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from dpivon import budget
from dpivon.cli import app
from dpivon.durable.checkpoint import Rotation
from dpivon.durable.ledger import names, read
from dpivon.errors import ArgumentError, DpivonError, PrivacyError, PrivacyWarning
from dpivon.methods import METHODS
from dpivon.optim.curvature import resolve
from dpivon.optim.steady import Steady
from dpivon.privacy.accounting.recorded import history
from dpivon.privacy.mechanism import NoiseSpec
from dpivon.privacy.stack import StackedMechanism
from dpivon.stacked import AnyNetwork, Run, Stack
from dpivon.stacked.checkpoint import StackCheckpoints
from dpivon.stacked.networks import cross_entropy

RUNS = [
    Run("dp-ivon-gradsq", 11, 1.0, 2.0, 0.5, 8),
    Run("dp-sgd", 12, 0.5, 1.0, 0.1, 8),
    Run("dp-adam", 13, 2.0, 0.5, 0.01, 8),
]


def stack(runs=RUNS, block=4, size=60, network=None):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, 3, 4, 4, generator=generator)
    labels = torch.randint(0, 10, (size,), generator=generator)
    network = network or AnyNetwork(lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 10)))
    return Stack(runs, network, images, labels, block=block)


def go(s, steps):
    for _ in s.train(steps):
        pass
    return s


def kept(folder, **options):
    s = stack(**options)
    return s, StackCheckpoints(s, folder)


def same(a, b):
    return all(torch.equal(p.state[n], q.state[n]) for p, q in zip(a.parts, b.parts, strict=True) for n in p.state)


def cost(releases):
    return [
        budget(dataset_size=60, batch_size=8, steps=releases, delta=1e-3, noise_multiplier=r.noise_multiplier).epsilon
        for r in RUNS
    ]


def spent(s):
    return [s.epsilon(i, 1e-3) for i in range(3)]


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("at", [0, 1, 5, 8])
def test_a_restored_stack_goes_on_as_if_it_had_never_stopped(tmp_path, at):
    whole = go(stack(), 11)
    first, disk = kept(tmp_path, block=3)
    assert disk.restore() == {}
    go(first, at)
    disk.save({"seconds": 2.5})
    disk.settle()
    disk.close()
    second, disk = kept(tmp_path)
    assert disk.restore() == {"seconds": 2.5}
    assert second.steps_done == at
    go(second, 11 - at)
    assert same(whole, second)
    assert spent(second) == spent(whole) == cost(11)
    assert disk.ledger.record.releases == 11


def test_a_stacks_ledger_pairs_every_run_with_its_own_terms(tmp_path):
    """A stack sorts its runs by method; whoever pairs them by place reads another run's σ."""
    s = stack(runs=RUNS[::-1])
    disk = StackCheckpoints(s, tmp_path, ["adam", "sgd", "ivon"])
    disk.restore()
    go(s, 3)
    s.mechanism.charge_beside(NoiseSpec(20.0, 1.0, 60.0, 1.0), 2)
    disk.close()
    record = read(tmp_path / "ledger.jsonl")
    assert [names(terms) for terms, _ in record.rows] == [record.names] * 2
    assert sorted(record.names) == ["adam", "ivon", "sgd"]
    sigma = {name: history(record, i)[0][0] for i, name in enumerate(record.names)}
    assert sigma == {"ivon": 1.0, "sgd": 0.5, "adam": 2.0}
    shown = json.loads(CliRunner().invoke(app, ["ledger", "show", str(tmp_path), "--json"]).output)
    assert {r["run"]: r["rows"][0]["noise_multiplier"] for r in shown[0]["runs"]} == sigma


def test_a_ledger_of_other_names_is_refused(tmp_path):
    first, disk = kept(tmp_path)
    disk.restore()
    go(first, 2)
    disk.close()
    for path in Rotation(tmp_path).files():
        path.unlink()
    with pytest.raises(PrivacyError, match="of other runs"):
        StackCheckpoints(stack(), tmp_path, ["a", "b", "c"]).restore()
    with pytest.raises(ArgumentError, match="3 different names"):
        StackCheckpoints(stack(), tmp_path / "new", ["a", "b", "a"])


def test_a_ledger_that_comes_after_the_first_step_is_refused(tmp_path):
    """It would have taken the place of an account that it does not hold."""
    s, disk = kept(tmp_path)
    before = spent(go(s, 4))
    with pytest.raises(PrivacyError, match="4 releases that would not be in it"):
        disk.restore()
    assert spent(s) == before == cost(4)


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("made", [1, 4, 6])
def test_what_was_lost_is_repeated_to_the_bit_and_charged_once(tmp_path, made):
    whole = go(stack(), 12)
    first, disk = kept(tmp_path)
    disk.restore()
    go(first, 4)
    disk.save({})
    go(first, made)
    disk.close()
    again, disk = kept(tmp_path)
    disk.restore()
    assert again.steps_done == 4
    assert spent(again) == cost(4 + made)
    go(again, 8)
    assert same(whole, again)
    assert spent(again) == cost(12)
    assert again.mechanism.reserved == again.mechanism.covered == 0
    assert disk.ledger.record.releases == 12


def test_a_lost_step_that_comes_out_differently_gets_new_noise_and_a_new_batch(tmp_path):
    first, disk = kept(tmp_path)
    disk.restore()
    go(first, 4)
    disk.save({})
    go(first, 4)
    disk.close()
    again, disk = kept(tmp_path)
    disk.restore()
    sums, drawn = again.gradients.clipped_sums, []
    draw = again.sampler.draw
    again.sampler.draw = lambda first_step, n: drawn.append(first_step) or draw(first_step, n)
    again.gradients.clipped_sums = lambda *a: sums(*a) * (1 + 1e-12)  # another machine, another rounding
    with pytest.warns(PrivacyWarning, match="not the one that was lost"):
        go(again, 6)
    assert again.steps_done == 10
    assert drawn == [4, 8, 12]  # the lost ones, once, of which nothing was released; then only new places
    assert spent(again) == cost(8 + 6)
    assert disk.ledger.record.releases == 14
    assert disk.ledger.record.rows[-1][0][0]["noise"] == "os-entropy, counter-based"  # a copy may stand there too


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("before", ["empirical-bayes-fisher", "averaged-fisher"])
def test_a_default_estimator_that_is_another_one_by_now_is_not_put_in_its_place(tmp_path, monkeypatch, before, written):
    """Beside a run that remembers what the old default did, so that the rows' shapes do not tell."""
    runs = [Run("dp-calm", 1, 1.0, 1.0, 0.01, 8), Run("dp-steady", 2, 1.0, 1.0, 3.5, 8)]
    with monkeypatch.context() as patch:
        patch.setitem(METHODS, "dp-steady", replace(METHODS["dp-steady"], rule=Steady(resolve(before))))
        if not written:  # as checkpoints were
            patch.setattr("dpivon.stacked.checkpoint.Rotation.write", without_estimators(Rotation.write))
        first, disk = kept(tmp_path, runs=runs)
        disk.restore()
        go(first, 2)
        disk.save({})
        disk.close()
    second, disk = kept(tmp_path, runs=runs)
    if not written and before == "averaged-fisher":  # nothing in such a checkpoint tells: the rows look alike
        assert disk.restore() == {}
        return
    with pytest.raises(ArgumentError, match=r"curvature=\['empirical-bayes-fisher', 'whole-fisher'\].*were begun with"):
        disk.restore()
    assert second.steps_done == 0


def without_estimators(write):
    return lambda files, at, state: write(files, at, {k: v for k, v in state.items() if k != "estimators"})


def test_without_a_checkpoint_what_the_ledger_has_is_charged_and_nothing_is_drawn_again(tmp_path):
    first, disk = kept(tmp_path)
    disk.restore()
    go(first, 6)
    disk.close()
    for path in tmp_path.glob("release-*"):
        path.unlink()
    again, disk = kept(tmp_path)
    with pytest.warns(PrivacyWarning, match="6 releases were made"):
        disk.restore()
    go(again, 5)
    assert spent(again) == cost(11)
    assert not set(again.mean.flatten().tolist()) & set(go(stack(), 5).mean.flatten().tolist())


def test_where_blocks_are_written_ahead_they_stay_charged_unless_it_stops_in_good_order(tmp_path, monkeypatch):
    """As on a GPU, where steps run without Python."""
    monkeypatch.setattr(StackedMechanism, "one_by_one", property(lambda self: False))
    whole = go(stack(), 12)
    first, disk = kept(tmp_path)
    disk.restore()
    first.mechanism.write_ahead(10)
    assert read(disk.ledger.path).releases == 10
    go(first, 4)
    disk.save({})
    disk.settle()
    assert read(disk.ledger.path).releases == 4
    go(first, 2)
    disk.close()  # killed: two were reserved, on disk, and lost
    again, disk = kept(tmp_path)
    with pytest.warns(PrivacyWarning, match="2 releases were made, or reserved, and lost"):
        disk.restore()
    assert int(again._at) == 6
    go(again, 8)
    assert spent(again) == cost(4 + 2 + 8)
    assert not same(whole, again)
    disk.save({})
    disk.settle()
    disk.close()
    third, disk = kept(tmp_path)
    disk.restore()
    assert same(third, again)
    assert spent(third) == cost(14)


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    first, disk = kept(tmp_path)
    disk.restore()
    go(first, 2)
    disk.save({})
    disk.close()
    others = [
        {"runs": [*RUNS[:2], Run("dp-adam", 14, 2.0, 0.5, 0.01, 8)]},
        {"runs": RUNS[:2]},
        {"runs": [*RUNS, Run("dp-sgd", 14, 0.5, 1.0, 0.1, 8)]},
        {"size": 61},
    ]
    for options in others:
        _, disk = kept(tmp_path, **options)
        with pytest.raises(ArgumentError, match=r"other runs.*Delete"):
            disk.restore()
        disk.close()
    for path in tmp_path.glob("release-*"):
        path.write_bytes(path.read_bytes()[:100])
    _, disk = kept(tmp_path)
    with pytest.raises(DpivonError, match=r"not one of its .* is whole"):
        disk.restore()


def test_a_missing_or_unreadable_ledger_is_never_taken_for_an_empty_one(tmp_path):
    first, disk = kept(tmp_path)
    disk.restore()
    go(first, 2)
    disk.save({})
    disk.close()
    path = disk.ledger.path
    whole = path.read_bytes()
    path.unlink()
    _, disk = kept(tmp_path)
    with pytest.raises(PrivacyError, match="missing"):
        disk.restore()
    disk.close()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    _, disk = kept(tmp_path)
    with pytest.raises(PrivacyError, match="cut short"):
        disk.restore()
    disk.close()
    path.write_text("{")
    with pytest.raises(PrivacyError, match="what was released is unknown"):
        kept(tmp_path)


def test_seeds_are_not_written_and_the_file_is_secret(tmp_path):
    secret = 0x1234_5678_9ABC_DEF
    _, disk = kept(tmp_path, runs=[Run("dp-sgd", secret, 1.0, 1.0, 0.1, 8)])
    disk.restore()
    path = disk.save({})
    content = path.read_bytes() + disk.ledger.path.read_bytes()
    assert str(secret).encode() not in content
    assert secret.to_bytes(8, "little") not in content
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


# ---- a folder that is copied, and gone on with twice


def copies(folder, made=4):
    first, disk = kept(folder / "first")
    disk.restore()
    go(first, made)
    disk.save({})
    disk.settle()
    disk.close()
    return [shutil.copytree(folder / "first", folder / f"copy {i}") for i in range(2)]


def gone_on(folder, network=None):
    """The noise and the batches of the next steps of a copy."""
    s = stack(network=network)
    disk = StackCheckpoints(s, folder)
    disk.restore()
    noises, release = [], s.mechanism.release

    def watched(sums, at):
        g = release(sums, at)
        noises.append(s.mechanism._noise.clone())
        return g

    s.mechanism.release = watched
    go(s, 4)
    disk.close()
    return torch.stack(noises), s._buffers.index.clone(), disk.ledger.record.rows[-1][0][0]["noise"]


@pytest.mark.parametrize("made", [4, 0])
def test_a_copy_that_once_drew_anew_never_goes_back_to_the_seeds_it_was_given(tmp_path, made):
    """The other copy goes on with those."""
    one, two = copies(tmp_path)
    other = stack(network=other_network())
    disk = StackCheckpoints(other, two)
    disk.restore()
    go(other, made)
    disk.save({})
    disk.settle()
    disk.close()
    first, disk = kept(one)
    disk.restore()
    go(first, made)
    disk.save({})
    disk.settle()
    disk.close()
    noise, batches, _ = gone_on(one)
    noise_there, batches_there, _ = gone_on(two, other_network())
    assert not set(noise.flatten().tolist()) & set(noise_there.flatten().tolist())
    assert not torch.equal(batches, batches_there)


def doubled(outputs, labels):
    return 2 * cross_entropy(outputs, labels)


def other_network():
    return AnyNetwork(lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 10)), doubled)


def test_a_copy_that_another_program_goes_on_with_draws_new_noise_and_batches(tmp_path):
    one, two = copies(tmp_path)
    noise, batches, origin = gone_on(one)
    noise_there, batches_there, origin_there = gone_on(two, other_network())
    assert not set(noise.flatten().tolist()) & set(noise_there.flatten().tolist())
    assert not torch.equal(batches, batches_there)
    assert (origin, origin_there) == ("seeded, counter-based", "os-entropy, counter-based")


def test_copies_of_one_program_make_the_same_releases(tmp_path):
    (noise, *_), (noise_there, *_) = map(gone_on, copies(tmp_path))
    assert torch.equal(noise, noise_there)


def test_on_a_gpu_every_copy_draws_new_noise_and_batches(tmp_path, monkeypatch):
    """Its sums differ in their last bits from run to run."""
    monkeypatch.setattr(StackedMechanism, "one_by_one", property(lambda self: False))
    (noise, batches, origin), (noise_there, batches_there, _) = map(gone_on, copies(tmp_path))
    assert origin == "os-entropy, counter-based"
    assert not set(noise.flatten().tolist()) & set(noise_there.flatten().tolist())
    assert not torch.equal(batches, batches_there)
