"""Gradients at draws around the mean: where they are taken, and how wide that leaves the posterior."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from dpivon import DpivonError
from dpivon.audit import stack_session
from dpivon.audit.subject import probe
from dpivon.audit.tier_a import TIER_A
from dpivon.optim.steady_rule import weight_scale
from dpivon.stacked import AnyNetwork, Run, Stack
from dpivon.stacked.checkpoint import StackCheckpoints

N, WIDTH = 400, 3


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, WIDTH, generator=generator)
    return x, torch.randint(0, 4, (N,), generator=generator)


def linear():
    return AnyNetwork(lambda: nn.Linear(WIDTH, 4))


def stack_of(data, *runs, **options):
    return Stack(list(runs), linear(), *data, **options)


def run(method="dp-sgd", seed=1, lr=0.1, **options):
    return Run(method, seed, 1.0, 1.0, lr, 64, options)


@pytest.mark.parametrize("method", ["dp-sgd", "dp-adam", "dp-calm", "dp-steady"])
def test_theta_is_a_draw_of_the_stated_width_around_the_mean(data, method):
    runs = [run(method, seed, jitter=0.5, ema=0.9) for seed in range(400)]
    stack = stack_of(data, *runs)
    for _ in stack.train(3):
        pass
    mean = stack.mean
    units = torch.stack([linear().initial(seed) for seed in range(400)])[stack.order]
    scale = torch.tensor([[weight_scale([row[:12], row[12:]], [(4, 3), (4, 1)])] for row in units])
    drawn = (stack._theta() - mean) / (0.5 * scale)
    assert drawn.std() == pytest.approx(1.0, abs=4 / (2 * drawn.numel()) ** 0.5)
    assert abs(float(drawn.mean())) < 4 / drawn.numel() ** 0.5


def test_another_step_has_another_draw_and_another_run_too(data):
    stack = stack_of(data, run(seed=1, jitter=0.5), run(seed=2, jitter=0.5))
    first = stack._theta() - stack.mean
    for _ in stack.train(1):
        pass
    second = stack._theta() - stack.mean
    assert not torch.allclose(first, second)
    assert not torch.allclose(first[0], first[1])


def test_without_noise_it_descends_the_expected_loss(data):
    """Where it settles, the loss expected under q is smaller than where training at the mean does, and the mean's is larger."""
    x, y = data
    quiet = {"weight_decay": 0.0, "ema": 0.995, "scale": 1.0}

    def expected_loss(mean, width):
        draws = mean + width * torch.randn(4000, len(mean), generator=torch.Generator().manual_seed(5))
        logits = torch.einsum("nw,dcw->dnc", x, draws[:, :12].view(-1, 4, 3)) + draws[:, None, 12:]
        return float(nn.functional.cross_entropy(logits.flatten(0, 1), y.repeat(4000)))

    widths = (0.0, 3.0)
    stack = stack_of(
        data, *(Run("dp-sgd", 3 + i, 0.01, 50.0, 0.5, 200, {**quiet, "jitter": j}) for i, j in enumerate(widths))
    )
    for _ in stack.train(600):
        pass
    plain, jittered = stack.average[stack.order.index(0)], stack.average[stack.order.index(1)]
    assert expected_loss(jittered, 3.0) < expected_loss(plain, 3.0)
    assert expected_loss(jittered, 0.0) > expected_loss(plain, 0.0)


def test_the_posterior_is_as_wide_as_the_draws_besides_the_spread(data):
    runs = [run("dp-steady", seed=i, lr=5.0, jitter=j, trace=t) for i, (j, t) in enumerate([(0.5, 0.0), (0.5, 1.0)])]
    stack = stack_of(data, *runs, steps=20)
    for _ in stack.train(20):
        pass
    row = linear().initial(0)
    width = 0.5 * weight_scale([row[:12], row[12:]], [(4, 3), (4, 1)])
    for v in stack.posterior(0, averaged=True).variance.values():
        torch.testing.assert_close(v, torch.full_like(v, width**2))
    both = torch.cat([v.flatten() for v in stack.posterior(1, averaged=True).variance.values()])
    part = stack.parts[[p.rows.start for p in stack.parts].index(stack.order.index(1))]
    row = linear().initial(1)
    width = 0.5 * weight_scale([row[:12], row[12:]], [(4, 3), (4, 1)])
    torch.testing.assert_close(both, part.state["spread"][0] + width**2)


def test_none_is_what_it_was(data):
    def trained(**options):
        stack = stack_of(data, run("dp-steady", lr=5.0, trace=1.0, **options), steps=8)
        for _ in stack.train(8):
            pass
        return stack.mean, stack.std

    assert all(torch.equal(a, b) for a, b in zip(trained(jitter=0.0), trained(), strict=True))


@pytest.mark.parametrize("method", ["dp-ivon-gradsq", "dp-sgld"])
def test_a_method_that_draws_by_itself_is_refused(method):
    with pytest.raises(DpivonError, match=rf"jitter=0.5: '{method}' draws by itself\. Leave it out"):
        run(method, jitter=0.5)


def test_a_width_below_nothing_is_refused():
    with pytest.raises(DpivonError, match="jitter=-1"):
        run(jitter=-1.0)


@pytest.mark.parametrize("options", [{"jitter": 1e39}, {"jitter": 0.5, "scale": 1e39}, {"trace": 1e39}])
def test_what_fp32_does_not_hold_is_refused(options):
    """It became an infinite width: every gradient was struck, and the budget went on noise alone."""
    name = list(options)[-1]
    with pytest.raises(DpivonError, match=rf"^{name}=1e\+39: is more than fp32 holds\. Use "):
        run("dp-steady", **options)


MIXED = [
    run("dp-steady", 1, jitter=0.5, trace=1.0),
    run("dp-sgd", 2),
    run("dp-sgd", 3, jitter=0.25),
    run("dp-steady", 4, metric=0.25, jitter=1.0),
    run("dp-sgd", 5, jitter=0.25, scale=2.0),
    run("dp-steady", 6),
    run("dp-calm", 7, jitter=0.5, curvature="whole-fisher", metric=0.25, ema=0.9),
    run("dp-steady", 8, curvature="whole"),
    run("dp-ivon-gradsq", 9, curvature="whole-fisher"),
]


def test_a_jittered_run_among_others_is_the_same_run_alone(data):
    def trained(*runs):
        stack = stack_of(data, *runs, steps=24, block=7)
        for _ in stack.train(24):  # past the first metric
            pass
        return stack

    together = trained(*MIXED)
    for i, each in enumerate(MIXED):
        alone = trained(each)
        for averaged in {False, each.averaged}:
            ours, own = together.posterior(i, averaged=averaged), alone.posterior(0, averaged=averaged)
            for name, mean in own.mean.items():
                torch.testing.assert_close(ours.mean[name], mean, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(ours.variance[name], own.variance[name], rtol=1e-4, atol=1e-7)
        assert together.epsilon(i, 1e-3) == alone.epsilon(0, 1e-3)


def test_a_killed_stack_draws_what_it_would_have_drawn_and_no_other_width_goes_on(data, tmp_path):
    def kept(runs, **options):
        stack = stack_of(data, *runs, block=2, **{"steps": 10, **options})
        return stack, StackCheckpoints(stack, tmp_path)

    whole = stack_of(data, *MIXED, block=2, steps=10)
    for _ in whole.train(10):
        pass
    first, disk = kept(MIXED)
    disk.restore()
    for _ in first.train(4):
        pass
    disk.save({})
    for _ in first.train(2):  # made, charged and lost
        pass
    disk.close()
    wider = [replace(r, options={**r.options, "jitter": 0.75}) if r.options.get("jitter") else r for r in MIXED]
    first_weights = torch.stack([linear().initial(r.seed) for r in MIXED])
    changed = (
        ((wider,), {}, "is of other runs"),
        ((MIXED,), {"steps": 20}, r"steps=.*: but runs in .* were begun with"),
        ((MIXED,), {"start": 3 * first_weights}, r"scale=.*: but runs in .* were begun with .*Go on with that\."),
    )
    for args, options, words in changed:
        _, disk = kept(*args, **options)
        with pytest.raises(DpivonError, match=words):
            disk.restore()
        disk.close()
    second, disk = kept(MIXED)
    disk.restore()
    for _ in second.train(6):
        pass
    disk.close()
    assert torch.equal(second.mean, whole.mean)
    assert torch.equal(second.std, whole.std)
    assert disk.ledger.record.releases == 10


@pytest.mark.parametrize("path", ["stacked", "captured"])
def test_the_audit_finds_nothing_in_a_jittered_stack(path, monkeypatch):
    def jittered(method, **values):
        return Run(method, **{**values, "options": {**values["options"], "jitter": 0.5}})

    monkeypatch.setattr(stack_session, "Run", jittered)
    subject = probe(path, "dp-steady")
    findings = [check(subject) for check in TIER_A]
    assert [f for f in findings if f.holds is False] == []
    assert sum(f.holds is True for f in findings) >= 9


def test_options_are_those_that_were_checked():
    """A caller who goes on using the dictionary made another run of it, and a checkpoint that belonged to none."""
    options = {"jitter": 0.5}
    made = Run("dp-sgd", 1, 1.0, 1.0, 0.1, 64, options)
    options["jitter"] = -1.0
    assert made.jitter == 0.5
    with pytest.raises(DpivonError, match=r"options='jitter': are not options by name\. Give a dictionary"):
        Run("dp-sgd", 1, 1.0, 1.0, 0.1, 64, "jitter")
