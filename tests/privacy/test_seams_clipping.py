"""Clipping rules of one's own, in engines, stacks and ``fit``: no rule exceeds what it states."""

from __future__ import annotations

import math

import pytest
import torch
from seam_cases import (
    Careless,
    Correlated,
    Normalised,
    data,
    net,
    private,
    spec_of,
    stack_of,
    train,
)
from torch import nn

import dpivon
from dpivon.audit.stack_session import TracedNetwork
from dpivon.durable.ledger import Ledger, read
from dpivon.errors import ArgumentError
from dpivon.privacy.clipping import (
    CLIPPINGS,
    FlatClipping,
    PerLayerClipping,
    clip_factors,
    clipped_sum,
    make_clipping,
    register_clipping,
)
from dpivon.privacy.mechanism import Mechanism, NoiseSpec
from dpivon.stacked.networks import AnyNetwork


@pytest.mark.parametrize("clipping", ["test-normalised", Normalised(1.0)])
def test_an_engine_clips_by_the_rule_and_says_so(tmp_path, clipping):
    with pytest.warns(dpivon.PrivacyWarning, match="not differentially private"):
        _, model, optimizer, loader = private(tmp_path, clipping=clipping, sigma=0.0, poisson_sampling=False)
    inner, (x, y) = net(), next(iter(loader))
    inner.load_state_dict(model._module.state_dict())
    expected = 0.0
    for a, b in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(inner(a[None]), b[None])
        flat = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(inner.parameters()))])
        expected = expected + flat / (flat.norm() + 0.01)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    got = torch.cat([g.flatten() for g in optimizer.last_release.gradients.values()])
    assert torch.allclose(got, expected / len(x), atol=1e-6)
    ((terms, _),) = read(tmp_path / "ledger.jsonl").rows
    assert terms[0]["clipping"] == "test-normalised"


@pytest.mark.parametrize("network", [AnyNetwork, TracedNetwork])
def test_a_stack_clips_by_the_rule(network):
    sums = {}
    for rule in ("flat", "test-normalised", "test-careless", "per_layer"):
        stack = stack_of(clipping=rule, network=network)
        stack.mechanism.reserve(1)
        stack._draw(1)
        seen, given = [], stack.gradients.clipped_sums
        stack.gradients.clipped_sums = lambda *a, given=given, seen=seen: seen.append((a, given(*a))) or seen[-1][1]
        stack.mechanism.spend()
        stack._launch()
        (theta, batch, *_), sums[rule] = seen[0]
    for k, c in enumerate((1.0, 2.0)):
        begin, end = int(batch.start[k]), int(batch.start[k + 1])
        model = stack.network.model(theta[k])
        each = []
        for a, b in zip(batch.inputs[begin:end], batch.labels[begin:end], strict=True):
            loss = nn.functional.cross_entropy(model(a[None]), b[None])
            each.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
        g = torch.stack(each).double()
        norms = g.norm(dim=1, keepdim=True)
        assert torch.allclose(sums["test-normalised"][k], (c * g / (norms + 0.01)).sum(0), atol=1e-5)
        assert torch.allclose(sums["flat"][k], (g * (c / norms).clamp(max=1)).sum(0), atol=1e-5)
        assert torch.allclose(sums["test-careless"][k], (g * (c / norms).clamp(max=3)).sum(0), atol=1e-4)
        parts = g.split([p.numel() for p in model.parameters()], 1)
        own = [p * (c / len(parts) ** 0.5 / p.norm(dim=1, keepdim=True)).clamp(max=1) for p in parts]
        assert torch.allclose(sums["per_layer"][k], torch.cat(own, 1).sum(0), atol=1e-5)


def test_fit_clips_by_the_rule():
    x, y = data()
    given = {"lr": 0.5, "batch_size": 10, "epochs": 2, "delta": 1e-3, "noise_multiplier": 1e-3, "method": "dp-sgd"}
    torch.manual_seed(0)
    model = net()
    flat, normalised, again = (
        dpivon.fit(model, x / 30, y, seed=1, clipping=rule, **given)
        for rule in ("flat", "test-normalised", Normalised(2.0))
    )
    means = [torch.cat([p.flatten() for p in f.model.parameters()]) for f in (flat, normalised, again)]
    assert not torch.allclose(means[0], means[1], atol=1e-3)
    assert torch.equal(means[1], means[2])
    assert flat.epsilon == normalised.epsilon


def test_a_rule_cannot_exceed_what_it_says():
    g = [torch.randn(50, 3, 4) * 10, torch.randn(50, 5)]
    g[0][7] = math.nan
    for i in range(50):
        total = clipped_sum([t[i : i + 1] for t in g], Careless(2.0))
        length = math.sqrt(sum(float(t.square().sum()) for t in total))
        assert length <= 2.0 * (1 + 1e-6)
        assert (length == 0.0) == (i == 7)
    ours = torch.rand(2, 9) * 3
    assert torch.equal(clip_factors(FlatClipping(1.0), ours), FlatClipping(1.0).factors(ours))
    assert (clip_factors(Careless(1.0), torch.zeros(2, 1)) <= 3.0).all()

    class Negative(Careless):
        def factor(self, norm):
            return -norm

    assert torch.equal(clip_factors(Negative(1.0), ours), torch.zeros_like(ours))


def test_rules_are_made_by_name_or_from_an_object_that_is_registered():
    assert make_clipping("test-normalised", 2.0, 4) == Normalised(2.0)
    assert make_clipping(Normalised(5.0), 2.0, 4) == Normalised(2.0)
    assert make_clipping(PerLayerClipping((3.0, 4.0)), 1.0, 2).bounds == pytest.approx((0.6, 0.8))

    class Unknown(FlatClipping):
        name = "test-unknown"

    for given in (Unknown(1.0), "test-unknown", object(), 3):
        with pytest.raises(ArgumentError, match="clipping"):
            make_clipping(given, 1.0, 2)
    with pytest.raises(ArgumentError, match="another clipping rule"):

        @register_clipping
        class Again(FlatClipping):
            pass

    assert set(CLIPPINGS) >= {"flat", "per_layer"}


def test_a_scheduler_changes_the_bound_of_any_rule():
    _, _, optimizer, _ = private(clipping="test-normalised")
    optimizer.max_grad_norm = 3.0
    assert optimizer.clipping == Normalised(3.0)


def test_a_run_does_not_go_on_under_another_rule(tmp_path):
    for clipping, fails in (("test-normalised", False), ("flat", True)):
        engine, model, optimizer, loader = private(clipping=clipping)
        run = dpivon.Checkpoints(tmp_path, engine=engine, optimizer=optimizer, data_loader=loader)
        if fails:
            with pytest.raises(ArgumentError, match="clipping"):
                run.restore()
        else:
            run.restore()
            train(model, optimizer, loader)
            run.save()
        engine.ledger.close()


def test_digests_of_gaussian_and_flat_specs_are_those_of_older_ledgers():
    assert NoiseSpec(1.0, 1.0, 10.0, 0.25).digest == NoiseSpec(1.0, 1.0, 10.0, 0.25, clipping="per_layer").digest
    assert NoiseSpec(1.0, 1.0, 10.0, 0.25).digest == "1c37204ac076f569"
    assert len({spec_of(m).digest for m in (Mechanism(), Correlated(), Correlated(0.1))}) == 3
    assert "clipping" not in NoiseSpec(1.0, 1.0, 10.0, 0.25).terms


def test_a_ledger_replays_the_cost(tmp_path):
    spec = spec_of(Correlated())
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.charge((spec.terms,), 3)
    ledger.close()
    assert dpivon.PrivacyEngine(ledger=tmp_path / "ledger.jsonl").accountant.history == [(1.0, 1.0, 3)]


@pytest.mark.parametrize("left", [1, 2])
@pytest.mark.parametrize("path", ["loop", "eager", "captured"])
def test_bounds_per_layer_are_refused_where_a_layer_was_frozen_since(path, left):
    engine, model, optimizer, loader = private(clipping="per_layer", max_grad_norm=[0.1, 0.2, 0.3, 0.4])

    def losses(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    step = None if path == "loop" else engine.compile(losses, capture=path == "captured")

    def release():
        train(model, optimizer, loader) if step is None else [step(batch) for batch in loader]

    release()
    made = len(engine.accountant)
    frozen = list(model.parameters())[left:]
    for p in frozen:
        p.requires_grad_(False)
    problem = rf"^max_grad_norm=\[0.1, 0.2, 0.3, 0.4\]: has 4 bounds, and .* now trained is {left}. Freeze before"
    with pytest.raises(ArgumentError, match=problem):
        release()
    assert len(engine.accountant) == made == 4
    for p in frozen:
        p.requires_grad_(True)
    release()
    assert len(engine.accountant) == 8
