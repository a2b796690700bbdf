"""Options of a stack's runs: what they may be, and that runs of different kinds do not touch each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from dpivon import DpivonError
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


@pytest.mark.parametrize("options", [{"scale": 1e39}, {"trace": 1e39}])
def test_what_fp32_does_not_hold_is_refused(options):
    """It became an infinite width: every gradient was dropped, and the budget went on noise alone."""
    name = list(options)[-1]
    with pytest.raises(DpivonError, match=rf"^{name}=1e\+39: is more than fp32 holds\. Use "):
        run("dp-steady", **options)


MIXED = [
    run("dp-steady", 1, trace=1.0),
    run("dp-sgd", 2),
    run("dp-sgd", 3, ema=0.9, trace=0.5),
    run("dp-steady", 4, trace=0.25, scale=2.0),
    run("dp-steady", 6),
    run("dp-calm", 7, curvature="whole-fisher", ema=0.9),
    run("dp-steady", 8, curvature="whole"),
    run("dp-ivon-gradsq", 9, curvature="whole-fisher"),
]


def test_a_run_among_others_of_other_kinds_is_the_same_run_alone(data):
    def trained(*runs):
        stack = stack_of(data, *runs, steps=24, block=7)
        for _ in stack.train(24):
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
    wider = [replace(r, options={**r.options, "trace": 0.75}) if r.options.get("trace") else r for r in MIXED]
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


def test_options_are_those_that_were_checked():
    """A caller who goes on using the dictionary made another run of it, and a checkpoint that belonged to none."""
    options = {"momentum": 0.5}
    made = Run("dp-sgd", 1, 1.0, 1.0, 0.1, 64, options)
    options["momentum"] = -1.0
    assert made.options == {"momentum": 0.5}
    with pytest.raises(DpivonError, match=r"options='momentum': are not options by name\. Give a dictionary"):
        Run("dp-sgd", 1, 1.0, 1.0, 0.1, 64, "momentum")
