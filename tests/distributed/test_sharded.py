"""FSDP2: a sharded model learns what a whole one learns, and what cannot be sharded safely is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import trainings
from processes import launch, run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import dpivon
from dpivon.optim import RuleOptimizer
from dpivon.optim.steady import Calm, SteadyOptimizer

STEPS, ROUNDING = 6, 2e-6


def training(
    rank: int, wrapper: Any, physical: int | None, method: str, batch: float = trainings.B, **options: Any
) -> Any:
    engine, model, optimizer, loader = trainings.start(method=method, wrap=wrapper, batch=batch, **options)
    trainings.place_noise(optimizer)
    seen = trainings.train(model, optimizer, loader, STEPS, physical)
    return seen, trainings.learned(engine, optimizer)


@pytest.mark.parametrize(
    ("world", "physical", "method", "batch"),
    [
        (1, None, "ivon", 12.0),
        pytest.param(2, None, "ivon", 12.0, marks=pytest.mark.slow),
        (2, 2, "ivon", 12.0),
        pytest.param(2, None, "prior", 12.0, marks=pytest.mark.slow),
        pytest.param(3, None, "sgd", 2.0, marks=pytest.mark.slow),
        pytest.param(2, None, "rule", 12.0, marks=pytest.mark.slow),
    ],
)
def test_a_sharded_model_learns_what_a_whole_one_does(world: int, physical: Any, method: str, batch: float) -> None:
    _, alone = training(0, None, None, method, batch)
    results = run(world, training, trainings.shard, physical, method, batch)
    for seen, learned in results:
        assert len(seen) == len(results[0][0])  # as many forwards on every rank
        assert trainings.apart(learned, alone) < ROUNDING
        assert trainings.apart(learned, results[0][1]) == 0.0
        assert learned["epsilon"] == alone["epsilon"]
    if physical or batch < 12.0:
        assert any(0 in seen for seen, _ in results)


def by_person(rank: int, wrapper: Any, physical: int | None) -> Any:
    ids = [i % 20 if i % 3 else i % 5 for i in range(trainings.N)]
    return training(rank, wrapper, physical, "ivon", 9.0, user_ids=ids, rows_per_user=4)


def test_people_are_learned_from_alike_and_in_whole_batches() -> None:
    _, alone = by_person(0, None, None)
    for _, learned in run(2, by_person, trainings.shard, None):
        assert trainings.apart(learned, alone) < ROUNDING
    with pytest.raises(AssertionError, match="BatchMemoryManager on a sharded model with user_ids"):
        run(2, by_person, trainings.shard, 5)


class Tokens(nn.Module):
    """An embedding, a shared layer, normalisations: everything that may be sharded, in units of several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.RMSNorm(8))
        self.norm, self.last = nn.GroupNorm(2, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        h = self.block(self.block(h))
        out: torch.Tensor = self.last(self.norm(h.transpose(1, 2)).mean(2))
        return out


def tokens(rank: int, sharded: bool) -> Any:
    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randint(11, (40, 6), generator=generator), torch.randint(3, (40,), generator=generator)
    )
    torch.manual_seed(0)
    net = Tokens()
    if sharded:
        fully_shard(net.block)
        fully_shard(net)
    engine = dpivon.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=0.01),
        data_loader=torch.utils.data.DataLoader(data, batch_size=10, generator=torch.Generator().manual_seed(1)),
        noise_multiplier=1.0,
        max_grad_norm=0.3,
    )
    trainings.place_noise(optimizer)
    for x, y in loader:
        trainings.one_step(model, optimizer, x, y)
    return trainings.learned(engine, optimizer)


def test_every_layer_that_may_be_sharded() -> None:
    alone = tokens(0, sharded=False)
    for learned in run(2, tokens, True):
        assert trainings.apart(learned, alone) < 1e-5


# ---- noise and θ


def noise_alone(rank: int) -> Any:
    net = nn.Sequential(nn.Linear(200, 100, bias=False), nn.Linear(100, 2, bias=False))
    fully_shard(net)
    torch.manual_seed(0)  # the same on every rank, as people do
    engine = dpivon.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=net,
        optimizer=dpivon.IVON(net.parameters(), lr=0.1, ess=4),
        data_loader=torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.ones(4, 200), torch.zeros(4).long()), batch_size=4
        ),
        noise_multiplier=1.5,
        max_grad_norm=0.5,
        noise_generator=torch.Generator().manual_seed(3),
    )
    out, thetas = [], []
    for _ in range(2):
        for x, _ in loader:
            optimizer.zero_grad()
            before = net[0].weight.full_tensor()
            with optimizer.sampled_params(train=True):
                thetas.append((net[0].weight.full_tensor() - before).detach())
                (0.0 * model(x).sum()).backward()
            optimizer.step()
            out.append(optimizer.last_release.gradients[net[0].weight] * 4 / (1.5 * 0.5))
    return torch.stack(out), torch.stack(thetas)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """In standard deviations under independence."""
    pair = torch.stack([a.flatten().double(), b.flatten().double()])
    return abs(float(torch.corrcoef(pair)[0, 1])) * pair.shape[1] ** 0.5


def test_every_rank_noises_its_own_part_from_a_stream_of_its_own() -> None:
    (first, theta), (second, same_theta) = run(2, noise_alone)
    assert first.shape == second.shape == (2, 50, 200)
    for noise in (first, second):
        assert abs(float(noise.var()) - 1) < 5 * (2 / noise.numel()) ** 0.5
        assert correlation(noise[0], noise[1]) < 5
    assert correlation(first, second) < 5
    assert torch.equal(theta, same_theta)  # one θ for all
    assert correlation(theta[0, :50], theta[0, 50:]) < 5
    assert correlation(first[0], theta[0, :50]) < 5


def in_one_unit(net: nn.Module) -> nn.Module:
    fully_shard(net)
    return net


def predictions(rank: int) -> Any:
    _, model, optimizer, loader = trainings.start(wrap=in_one_unit)
    trainings.train(model, optimizer, loader, 2)
    x = trainings.dataset().tensors[0][:5]
    found = []
    model.eval()
    for _ in range(3):
        with torch.no_grad(), optimizer.sampled_params():
            weights = {
                n: p.full_tensor() for n, p in zip(trainings.network().state_dict(), optimizer.params, strict=True)
            }
            outputs = model(x)
        plain = trainings.network()
        plain.load_state_dict(weights)
        found.append((outputs, plain(x).detach()))
    return found


def predicted_by_its_posterior(rank: int) -> Any:
    _, _, optimizer, _ = trainings.start(wrap=in_one_unit)
    dpivon.predict(optimizer.module, optimizer.posterior(), trainings.dataset().tensors[0])


def test_a_forward_sees_the_weights_of_the_moment() -> None:
    """The outermost layers of FSDP2 stay whole after a forward: the next sample of θ must not see them."""
    for found in run(2, predictions):
        for outputs, expected in found:
            assert torch.allclose(outputs, expected, atol=1e-6)
        assert not torch.allclose(found[0][0], found[1][0], atol=1e-3)
    for word, text in launch(2, predicted_by_its_posterior):
        assert word == "ArgumentError"
        assert "is sharded" in text


# ---- what is refused


class Reaching(nn.Module):
    """Uses a layer's weight behind the layer's back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x) @ self.first.weight)
        return out


WRITTEN: list[Any] = []


class Writing(nn.Linear):
    """Writes to this rank's part of its weight, which outlives the whole copy that a forward sees."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for part in WRITTEN:
                part.to_local().add_(1e-6 * float(x.mean()))
        return super().forward(x)


def refusals(rank: int) -> dict[str, str]:
    """How each of them ends; every rank goes from one to the next."""
    found = {}
    for what in REFUSED:
        try:
            attempt(what)
        except dpivon.DpivonError as error:
            found[what] = f"{type(error).__name__}: {error}"
    return found


def optimizer_for(what: str, params: Any) -> torch.optim.Optimizer:
    if what in ("empirical-bayes", "whole"):
        return dpivon.IVON(params, lr=0.1, ess=60, curvature=what)
    if what == "steady":
        return SteadyOptimizer(params, ess=60)
    if what == "calm rule":
        return RuleOptimizer(params, Calm(), lr=0.1, ess=60.0)
    if what == "rule":
        return dpivon.LangevinDynamics(params, lr=0.1, ess=60)
    return torch.optim.SGD(params, lr=0.1)


def attempt(what: str) -> None:
    net: Any = trainings.network()
    if what == "conv":
        net = nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 3, 5), nn.Flatten())
    if what == "reaching":
        net = Reaching()
    if what == "writing":
        net = nn.Sequential(nn.Linear(5, 4).requires_grad_(False), Writing(4, 3).requires_grad_(False), nn.Linear(3, 3))
    if what == "part":
        fully_shard(net[0])
    elif what == "order":
        fully_shard(net, mesh=DeviceMesh("cpu", [1, 0]))
    else:
        fully_shard(net)
    engine = dpivon.PrivacyEngine(distributed=what != "alone")
    model, optimizer, loader = engine.make_private(
        module=net,
        optimizer=optimizer_for(what, net.parameters()),
        data_loader=torch.utils.data.DataLoader(trainings.dataset(), batch_size=12),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    if what == "writing":
        WRITTEN[:] = [net[1].weight]
    if what == "memory":
        engine.largest_physical_batch(nn.CrossEntropyLoss(), trainings.dataset()[:4], memory=1e9)
    for x, y in loader:
        trainings.one_step(model, optimizer, x, y)


REFUSED = {
    "conv": ("ArgumentError", "has no rule for sharded weights"),
    "part": ("ArgumentError", "is not sharded while other"),
    "order": ("ArgumentError", "is not split by rows over all 2 ranks in their order"),
    "empirical-bayes": ("ArgumentError", "curvature='empirical-bayes'"),
    "whole": (
        "ArgumentError",
        "curvature='whole': pools over weights of which each rank has a part. Use 'gradsq-corrected'",
    ),
    "steady": ("ArgumentError", "optimizer='SteadyOptimizer': does not know sharded"),  # whatever its curvature
    "calm rule": ("ArgumentError", "Use 'averaged-fisher'"),  # one that it would take
    "rule": ("ArgumentError", "does not know sharded"),
    "alone": ("ArgumentError", "trains alone"),
    "writing": ("PrivacyError", "'1.weight' was changed by forward"),
    "memory": ("ArgumentError", "is sharded: ranks would wait for one that failed"),
    "reaching": ("Unattributed", "outside its layer"),  # a PrivacyError
}


def test_what_cannot_be_sharded_is_refused() -> None:
    for found in run(2, refusals):
        assert set(found) == set(REFUSED)
        for what, (error, said) in REFUSED.items():
            assert found[what].startswith(f"{error}: ")
            assert said in found[what]


def test_the_page_names_what_may_be_sharded() -> None:
    from dpivon.privacy.ranks.team import LAYERS, NAMED_LAYERS

    page = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
    listed = page.split("and these layers: ")[1].split(" (tied")[0]
    names = {re.sub(r"\dd$", "", kind.__name__) for kind in LAYERS} | set(NAMED_LAYERS)
    assert {name.strip("` \n") for name in listed.split(",")} == names
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", page):
        assert (Path(__file__).parents[2] / "docs" / target).exists(), target


# ---- bugs sown on purpose: the tests above must see them


def with_bug(rank: int, bug: str) -> Any:
    from dpivon.privacy.ranks import team as sharded

    if bug == "averaged over ranks":
        right = sharded.Group.reduce_scatter
        sharded.Group.reduce_scatter = lambda self, parts: right(self, parts) / self.world
        return training(rank, trainings.shard, None, "sgd")[1]
    if "one noise" in bug:
        right_branch = sharded.TorchNoise.branch
        sharded.TorchNoise.branch = lambda self, material: right_branch(self, material.split(b" noise")[0])
        if bug == "one noise for all parts, unnoticed":
            sharded.Sharded._streams = sharded.Team._streams
        return noise_alone(rank)
    if bug == "one seed on all ranks":
        _, model, optimizer, loader = trainings.start(wrap=trainings.shard)
        optimizer.noise = sharded.TorchNoise(torch.Generator().manual_seed(3))
        torch.randn(rank, generator=optimizer.noise.generator)  # at another place of the same stream
        return trainings.train(model, optimizer, loader, 1)
    sharded.fsdp_modules = lambda module: []  # weights that were gathered stay, and are used again
    return predictions(rank)


def test_bugs_of_sharding_are_seen() -> None:
    _, alone = training(0, None, None, "sgd")
    assert trainings.apart(run(2, with_bug, "averaged over ranks")[0], alone) > 1000 * ROUNDING
    (first, _), (second, _) = run(2, with_bug, "one noise for all parts, unnoticed")
    assert correlation(first, second) > 50
    for bug in ("one noise for all parts", "one seed on all ranks"):
        for word, text in launch(2, with_bug, bug):
            assert word == "PrivacyError"
            assert "Two ranks would draw the same noise" in text
    stale = run(2, with_bug, "stale weights")[0]
    assert not all(torch.allclose(outputs, expected, atol=1e-6) for outputs, expected in stale)
