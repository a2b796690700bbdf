"""Where noise and batches come from: the operating system unless the caller says otherwise, and the ledger says which."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from private_runs import data, without_rules
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

from dpivon import IVON, ArgumentError, BatchMemoryManager, Checkpoints, PrivacyEngine, PrivacyError
from dpivon.cli import app
from dpivon.durable.ledger import read
from dpivon.optim import tensors
from dpivon.privacy import mechanism, noise
from dpivon.privacy.accounting.recorded import drawn, seeded
from dpivon.privacy.noise import TorchNoise, renewed
from dpivon.stacked import AnyNetwork, Run, Stack
from dpivon.stacked.checkpoint import StackCheckpoints

STEPS = 4


def private(engine: PrivacyEngine, sampling: torch.Generator | None = None, **options):
    net = nn.Linear(5, 3)
    loader = DataLoader(TensorDataset(*data()), batch_size=4, generator=sampling)
    return engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )


def train(made) -> tuple[list[Tensor], list[int]]:
    """What was released, and the sizes of the batches."""
    model, optimizer, loader = made
    released, sizes = [], []
    while len(released) < STEPS:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y, reduction="sum").div(max(len(x), 1)).backward()
            optimizer.step()
            released.append(torch.cat([g.flatten() for g in optimizer.last_release.gradients.values()]))
            sizes.append(len(x))
            if len(released) == STEPS:
                break
    return released, sizes


def twice(make: Callable[[], PrivacyEngine], **options) -> tuple[bool, bool]:
    """Whether two runs after the same ``torch.manual_seed`` release the same, and draw the same batches."""
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        given = {name: value() for name, value in options.items()}
        made = private(make(), **given)
        members = [list(batch) for _ in range(5) for batch in made[2].batch_sampler]
        runs.append((train(made)[0], members))
    (first, drawn_first), (second, drawn_second) = runs
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), drawn_first == drawn_second


@pytest.mark.os_entropy
def test_the_global_seed_decides_neither_noise_nor_batches():
    assert twice(PrivacyEngine) == (False, False)
    assert twice(lambda: PrivacyEngine(secure_mode=True)) == (False, False)


@pytest.mark.os_entropy
def test_a_generator_of_the_callers_decides_both():
    assert twice(lambda: PrivacyEngine(generator=torch.Generator().manual_seed(3))) == (True, True)
    assert twice(lambda: PrivacyEngine(generator=torch.default_generator)) == (True, True)
    # Either alone is not enough: the other half is the operating system's.
    assert twice(PrivacyEngine, sampling=lambda: torch.Generator().manual_seed(3)) == (False, True)


@pytest.mark.os_entropy
def test_noise_and_batches_are_apart_and_two_engines_of_one_generator_too():
    parent = torch.Generator().manual_seed(3)
    first, second = private(PrivacyEngine(generator=parent)), private(PrivacyEngine(generator=parent))
    states = [o.generator.get_state() for _, o, _ in (first, second)]
    states += [loader.batch_sampler.generator.get_state() for _, _, loader in (first, second)]
    assert len({bytes(s.tolist()) for s in states}) == 4


def test_a_seed_alone_would_leave_32_secret_bits():
    """Why the whole state is drawn: torch's generator for CPUs does not read more of its seed."""
    a, b = (torch.randn(8, generator=torch.Generator().manual_seed(5 + high)) for high in (0, 7 << 32))
    assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("std", [0.37, 1e-3, 123.456])
def test_noise_is_the_generators_standard_normal_times_its_width(dtype, std):
    """To the bit, for tensors of any size: a resumed run draws what the interrupted one drew, whichever way it is drawn."""
    source, reference = (torch.Generator().manual_seed(4) for _ in range(2))
    for size in (1, 2, 15, 16, 17, 33, 1000):
        drawn_here = TorchNoise(source).normal(torch.empty(size, dtype=dtype), std)
        assert torch.equal(drawn_here, torch.randn(size, dtype=dtype, generator=reference) * std)
    assert torch.equal(source.get_state(), reference.get_state())


def test_the_whole_state_comes_from_the_operating_system(monkeypatch):
    states = [renewed(torch.Generator()).get_state()[24 : 24 + 624 * 8].view(torch.int64) for _ in range(2)]
    assert int((states[0] == states[1]).sum()) == 0
    assert all(int(s.min()) >= 0 and int(s.max()) < 2**32 for s in states)
    assert len(states[0].unique()) == 624
    one, two = (renewed(torch.Generator().manual_seed(9)) for _ in range(2))
    assert not torch.equal(torch.rand(9, generator=one), torch.rand(9, generator=two))
    sample = torch.randn(100_000, generator=one, dtype=torch.float64)
    assert abs(float(sample.mean())) < 5 / 100_000**0.5
    assert abs(float(sample.var()) - 1) < 5 * (2 / 100_000) ** 0.5
    # Every word that is asked of the operating system is in the state, and nothing else decides it.
    monkeypatch.setattr(noise.os, "urandom", lambda n: bytes(range(256)) * (n // 256) + bytes(range(n % 256)))
    same = [renewed(torch.Generator()).get_state() for _ in range(2)]
    assert torch.equal(*same)


def test_a_torch_that_keeps_its_state_otherwise_is_refused(monkeypatch):
    monkeypatch.setattr(noise, "_KNOWN_WORDS", [1, 2])
    with pytest.raises(PrivacyError, match=r"torch=.*32 secret bits.*secure_mode=True"):
        renewed(torch.Generator())


def test_a_refresh_is_new_whatever_seed_was_set():
    source = TorchNoise(torch.Generator().manual_seed(3))
    assert source.origin == "seeded"
    source.refresh()
    assert source.origin == "os-entropy"
    other = TorchNoise(torch.Generator().manual_seed(3))
    other.refresh()
    assert not torch.equal(source.normal(torch.zeros(9), 1.0), other.normal(torch.zeros(9), 1.0))


ORIGINS: dict[str, tuple[Callable[[], PrivacyEngine], Callable[[], dict], str]] = {
    "default": (PrivacyEngine, dict, "noise os-entropy, batches os-entropy"),
    "engine": (
        lambda: PrivacyEngine(generator=torch.Generator().manual_seed(0)),
        dict,
        "noise seeded, batches seeded",
    ),
    "noise": (
        PrivacyEngine,
        lambda: {"noise_generator": torch.Generator().manual_seed(0)},
        "noise seeded, batches os-entropy",
    ),
    "batches": (
        PrivacyEngine,
        lambda: {"sampling": torch.Generator().manual_seed(0)},
        "noise os-entropy, batches seeded",
    ),
    "secure": (lambda: PrivacyEngine(secure_mode=True), dict, "noise cryptographic, batches cryptographic"),
}


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("name", ORIGINS)
def test_the_ledger_says_who_drew(tmp_path, name):
    make, options, words = ORIGINS[name]
    engine = make()
    made = private(engine, **options())
    engine.attach_ledger(tmp_path / "ledger.jsonl")
    train(made)
    record = read(tmp_path / "ledger.jsonl")
    assert drawn(record, 0) == {words: STEPS}
    assert seeded(record, 0) == (STEPS if "noise seeded" in words else 0)
    told = CliRunner().invoke(app, ["ledger", "show", str(tmp_path)]).output
    assert f"{STEPS} × {words}" in told


def test_the_ledger_of_a_stack_says_so_too(tmp_path):
    stack = Stack([Run("dp-sgd", 7, 1.0, 1.0, 0.1, 4)], AnyNetwork(lambda: nn.Linear(5, 3)), *data())
    kept = StackCheckpoints(stack, tmp_path)
    kept.restore()
    for _ in stack.train(3):
        pass
    assert drawn(kept.ledger.record, 0) == {"noise seeded, counter-based, batches seeded, counter-based": 3}
    assert seeded(kept.ledger.record, 0) == 3


@pytest.mark.parametrize("seed", [None, 3])
def test_an_export_tells_whether_the_noise_can_be_removed(tmp_path, seed):
    engine = PrivacyEngine(generator=None if seed is None else torch.Generator().manual_seed(seed))
    made = private(engine)
    run = Checkpoints(tmp_path / "run", engine=engine, optimizer=made[1], data_loader=made[2])
    run.restore()
    train(made)
    run.save()
    engine.ledger.close()
    result = CliRunner().invoke(
        app, ["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--delta", "1e-3"]
    )
    assert result.exit_code == 0, result.output
    assert ("noise of a seeded generator" in result.stderr) == (seed is not None)
    origin = "os-entropy" if seed is None else "seeded"
    told = json.loads((tmp_path / "out" / "privacy.json").read_text())
    assert told["drawn_by"] == {f"noise {origin}, batches {origin}": STEPS}


def test_a_ledger_of_before_counts_as_seeded(tmp_path):
    engine = PrivacyEngine(ledger=tmp_path / "ledger.jsonl")
    terms = {"noise_multiplier": 1.0, "sample_rate": 0.1, "unaccounted": None}
    engine.ledger.charge((terms,), 5)
    assert seeded(read(tmp_path / "ledger.jsonl"), 0) == 5
    assert drawn(read(tmp_path / "ledger.jsonl"), 0) == {"noise unstated, batches unstated": 5}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"generator": 7}, r"generator=7: is not a torch.Generator"),
        ({"generator": torch.Generator(), "secure_mode": True}, r"generator=.*contradicts secure_mode=True"),
    ],
)
def test_bad_generators(options, words):
    with pytest.raises(ArgumentError, match=words):
        PrivacyEngine(**options)


# ---- the batch that a release is told to be of


def test_a_release_is_told_the_expected_batch_and_never_the_drawn_one():
    torch.manual_seed(0)
    made = private(PrivacyEngine())
    sizes, told = set(), set()
    for _ in range(8):
        _, drawn_sizes = train(made)
        sizes |= set(drawn_sizes)
        told.add(made[1].last_release.batch_size)
    assert len(sizes) > 3
    assert told == {4.0}


def test_an_empty_batch_and_one_in_parts_are_told_the_same():
    torch.manual_seed(0)
    model, optimizer, loader = private(PrivacyEngine(), expected_batch_size=1)  # one batch in three is empty
    seen = {}
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=1, optimizer=optimizer) as parts:
        rows = 0
        for x, y in parts:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y, reduction="sum").div(max(len(x), 1)).backward()
            before = optimizer.last_release
            optimizer.step()
            rows += len(x)
            if optimizer.last_release is not before:
                seen[rows], rows = optimizer.last_release.batch_size, 0
    assert 0 in seen
    assert max(seen) > 1
    assert set(seen.values()) == {1.0}


def test_a_sum_is_told_no_batch():
    made = private(PrivacyEngine(), loss_reduction="sum")
    train(made)
    assert made[1].last_release.batch_size is None


# ---- floating point


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_noise_is_added_in_double_and_what_is_released_is_rounded(mode, dtype):
    """So that low bits of the noise, on which attacks on floating point rest, are not in anything that anybody gets."""
    torch.manual_seed(0)
    net = nn.Linear(5, 3).to(dtype)
    x, y = data()
    with without_rules() if mode == "alone" else nullcontext():
        model, optimizer, loader = PrivacyEngine().make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(x.to(dtype), y), batch_size=12),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    normal, drawn_in = optimizer.noise.normal, set()
    optimizer.noise.normal = lambda like, std: drawn_in.add(like.dtype) or normal(like, std)
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    assert drawn_in == {torch.float64}
    rounded = torch.float64 if dtype == torch.float64 else torch.float32
    assert {g.dtype for g in optimizer.last_release.gradients.values()} == {rounded}


@pytest.mark.parametrize(
    ("own", "asked", "same"),
    [
        ("cuda", "cuda:0", True), ("cuda:1", "cuda:1", True), ("cuda:1", "cuda:0", False),
        ("cpu", "cpu", True), ("cpu", "cuda:0", False),
    ],
)  # fmt: skip
def test_a_generator_serves_its_own_kind_of_device(monkeypatch, own, asked, same):
    """torch says "cuda" of a generator that was made without a number."""
    given, child = SimpleNamespace(device=torch.device(own)), SimpleNamespace()
    monkeypatch.setattr("dpivon.privacy.noise.own_generator", lambda parent, device: child)
    assert TorchNoise(given)._on(torch.device(asked)) is (given if same else child)


def seeded_with(seed: int, drawn: int = 0) -> torch.Generator:
    generator = torch.Generator().manual_seed(seed)
    torch.rand(drawn, generator=generator)
    return generator


@pytest.mark.parametrize("drawn", [0, 5])
def test_noise_that_would_repeat_what_drew_the_batches_is_refused(drawn):
    """With one seed for both, the noise of a coordinate is small where an example is in the batch."""
    with pytest.raises(ArgumentError, match=r"noise_generator=.*data loader's generator.*Seed them differently"):
        private(PrivacyEngine(), seeded_with(3, drawn), noise_generator=seeded_with(3))
    with pytest.raises(ArgumentError, match="data loader's generator"):
        private(PrivacyEngine(), torch.Generator(), noise_generator=torch.Generator())  # which torch seeds alike
    private(PrivacyEngine(), seeded_with(3), noise_generator=seeded_with(4))
    private(PrivacyEngine(), one := seeded_with(3), noise_generator=one)  # one after the other
    private(PrivacyEngine(), renewed(torch.Generator()), noise_generator=renewed(torch.Generator()))


def test_noise_that_a_posterior_sample_or_an_earlier_optimizer_shows_is_refused():
    engine, loader = PrivacyEngine(), DataLoader(TensorDataset(*data()), batch_size=4)

    def made(noise, optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1)):
        net = nn.Linear(5, 3)
        options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "noise_generator": noise}
        return engine.make_private(module=net, optimizer=optimizer(net), data_loader=loader, **options)

    with pytest.raises(ArgumentError, match="the optimizer's generator"):
        made(seeded_with(3), lambda net: IVON(net.parameters(), lr=0.1, ess=1e4, generator=seeded_with(3)))
    _, first, _ = made(seeded_with(3))
    with pytest.raises(ArgumentError, match="noise of optimizer 0 of this engine"):
        made(seeded_with(3))
    made(first.generator)
    del first
    gc.collect()
    with pytest.raises(ArgumentError, match="noise of optimizer 0 of this engine"):  # what it released is still there
        made(seeded_with(3))


def test_noise_that_sums_are_added_to_in_place_gives_the_same_release(monkeypatch):
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), (2, 2, 2))]
    sums = {p: torch.randn(p.shape, dtype=torch.float64) for p in params}
    kept = {p: total.clone() for p, total in sums.items()}
    spec = mechanism.NoiseSpec(1.3, 0.7, 17.0, 0.1)
    monkeypatch.setattr(tensors, "joins", lambda given: True)  # as on a GPU
    found = []
    for in_place in (True, False):
        monkeypatch.setattr(mechanism, "joins", lambda given, in_place=in_place: in_place)
        source = TorchNoise(torch.Generator().manual_seed(3))
        found.append(mechanism.release(dict(sums), spec, source, lambda spec: None).gradients)
    for p in params:
        assert torch.equal(found[0][p], found[1][p])
        assert found[0][p].dtype == torch.float32
        assert torch.equal(sums[p], kept[p])
    monkeypatch.setattr(mechanism, "joins", lambda given: True)
    free = mechanism.NoiseSpec(0.0, 0.7, 17.0, 0.1)
    for size in (14, 100):  # in two parts, and in one
        monkeypatch.setattr(mechanism, "_AT_ONCE", size)
        exact = mechanism.release(dict(sums), free, TorchNoise(), lambda spec: None).gradients
        assert all(torch.equal(exact[p], (sums[p] / 17.0).float()) for p in params)
        noisy = mechanism.release(dict(sums), spec, TorchNoise(), lambda spec: None).gradients
        off = torch.cat([(noisy[p] - exact[p]).flatten() for p in params])
        assert len(off.unique()) == len(off)
