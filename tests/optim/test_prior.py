"""A Gaussian prior in the update: weight decay is its special case, and on a quadratic it gives Bayes' rule."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import dpivon
from dpivon import IVON, Posterior
from dpivon.errors import ArgumentError
from dpivon.optim.steady import SteadyOptimizer
from dpivon.stacked import AnyNetwork, Run, Stack

N, DELTA = 64, 2.0**-10  # 1/(N δ) and back are exact


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def gaussian(model: nn.Module, mean: float = 0.0, variance: float = 1 / (N * DELTA)) -> Posterior:
    named = dict(model.named_parameters())
    return Posterior(*({n: torch.full_like(p, v) for n, p in named.items()} for v in (mean, variance)))


def optimizer(kind: str, model: nn.Module, **options: object):
    named = list(model.named_parameters())
    if kind == "steady":
        return SteadyOptimizer(named, ess=N, steps=9, temperature=1.0, **options)
    return IVON(named, lr=0.1, ess=N, curvature=kind, generator=torch.Generator().manual_seed(1), **options)


def train(kind: str, steps: int, model: nn.Module, **options: object):
    made = optimizer(kind, model, **options)
    go_on(made, model, steps)
    return made


def go_on(made, model: nn.Module, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        made.zero_grad()
        context = made.sampled_params(train=True) if isinstance(made, IVON) else torch.enable_grad()
        with context:
            model(x).square().mean().backward()
        made.step()


@pytest.mark.parametrize("kind", ["reparam", "gradsq", "averaged", "steady"])
def test_weight_decay_is_a_prior_to_the_bit(kind: str) -> None:
    plain, prior = network(), network()
    a = train(kind, 5, plain, weight_decay=DELTA)
    b = train(kind, 5, prior, weight_decay=DELTA, prior=gaussian(prior))
    for p, q in zip(plain.parameters(), prior.parameters(), strict=True):
        assert torch.equal(p, q)
    one, other = a.posterior(plain), b.posterior(prior)
    for name in one.mean:
        assert torch.equal(one.variance[name], other.variance[name])


@pytest.mark.parametrize("method", ["dp-ivon-gradsq", "dp-steady"])
def test_weight_decay_is_a_prior_to_the_bit_in_a_stack(method: str) -> None:
    x, y = torch.randn(N, 3), torch.randint(0, 2, (N,))
    runs = [Run(method, seed, 1.0, 1.0, 0.1, 16, {"weight_decay": DELTA}) for seed in (1, 2)]
    stacks = [Stack(runs, AnyNetwork(network), x, y, steps=4, prior=prior) for prior in (None, gaussian(network()))]
    for stack in stacks:
        list(stack.train(4))
    assert torch.equal(stacks[0].mean, stacks[1].mean)
    assert torch.equal(stacks[0].std, stacks[1].std)


def test_on_a_quadratic_the_posterior_is_that_of_bayes_rule() -> None:
    """N/2 Σ λ_i (θ_i − a_i)² as the loss of N examples, and the prior N(μ, v): mean and variance are known."""
    lam, at = torch.tensor([0.5, 1.0, 4.0]), torch.tensor([1.0, -2.0, 0.5])
    mu, v = torch.tensor([0.0, 3.0, -1.0]), torch.tensor([0.1, 0.02, 1.0])
    theta = nn.Parameter(torch.zeros(3))
    made = IVON(
        [("theta", theta)],
        lr=0.2,
        ess=N,
        hess_init=1.0,
        beta1=0.0,
        beta2=1.0,
        rescale_lr=False,
        curvature="gradsq",
        prior=Posterior({"theta": mu}, {"theta": v}),
    )
    made.state[theta].update({"step": 0, "momentum": torch.zeros(3), "hess": lam.clone()})
    for _ in range(400):
        theta.grad = lam * (theta.detach() - at)
        made.step()
    precision = N * lam + 1 / v
    torch.testing.assert_close(theta.detach(), (N * lam * at + mu / v) / precision)
    torch.testing.assert_close(made.posterior().variance["theta"], 1 / precision)


@pytest.mark.parametrize("kind", ["gradsq", "steady"])
def test_the_priors_mean_is_where_zero_was(kind: str) -> None:
    """With the same gradients, weights and prior moved by μ stay moved by μ."""
    models, ends = [network(), network()], []
    for model, mu in zip(models, (0.0, 0.7), strict=True):
        with torch.no_grad():
            for p in model.parameters():
                p += mu
        options = {"scale": 0.5} if kind == "steady" else {}
        made = optimizer(kind, model, prior=gaussian(model, mu, 1e-3), **options)
        g = torch.Generator().manual_seed(3)
        for _ in range(6):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=g)
            made.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]) - mu)
    start = torch.cat([p.detach().flatten() for p in network().parameters()])
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-6)
    assert (ends[0] - start).norm() > 0.1


@pytest.mark.parametrize("kind", ["gradsq", "steady"])
def test_a_saved_state_and_a_copy_keep_their_prior(kind: str) -> None:
    models = [network() for _ in range(3)]
    prior = gaussian(models[0], 0.5, 0.01)
    whole = train(kind, 2, models[0], prior=prior)
    models[1].load_state_dict(models[0].state_dict())
    resumed = optimizer(kind, models[1])
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    if kind == "gradsq":
        resumed.generator.set_state(whole.generator.get_state())
    for made, model in ((whole, models[0]), (resumed, models[1])):
        go_on(made, model, 2)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
    fresh, twin = copy.deepcopy((optimizer(kind, models[2], prior=prior), models[2]))
    go_on(fresh, twin, 1)
    assert all("prior_mean" in fresh.state[p] for p in twin.parameters())


def test_fit_takes_a_file(tmp_path) -> None:
    model, x, y = network(), torch.randn(N, 3), torch.randint(0, 2, (N,))
    gaussian(model, 0.5, 1e-4).save(tmp_path / "prior.safetensors")
    variances = []
    for prior in (None, tmp_path / "prior.safetensors"):
        fitted = dpivon.fit(
            model, x, y, method="dp-ivon-gradsq", lr=0.1, prior=prior, noise_multiplier=1.0, delta=1e-3, batch_size=16,
            epochs=1, seed=1,
        )  # fmt: skip
        variances.append(torch.cat([v.flatten() for v in fitted.posterior.variance.values()]))
    assert (variances[1] < variances[0]).all()  # a tight prior makes a tight posterior
    assert (variances[1] < 1e-4).all()  # and tighter than itself


def test_what_is_no_prior_of_this_network_is_refused() -> None:
    model = network()
    wrong_name = Posterior({"w": torch.zeros(3)}, {"w": torch.ones(3)})
    with pytest.raises(ArgumentError, match=r"has no parameter '0.weight'.*named_parameters"):
        optimizer("gradsq", model, prior=wrong_name)
    named = {n: torch.zeros(1) for n, _ in model.named_parameters()}
    with pytest.raises(ArgumentError, match=r"prior='0.weight': has shape \(1,\), and the parameter \(4, 3\)"):
        optimizer("steady", model, prior=Posterior(named, {n: torch.ones(1) for n in named}))
    with pytest.raises(ArgumentError, match="variance of 0"):
        optimizer("gradsq", model, prior=Posterior.point(model))
    with pytest.raises(ArgumentError, match="is not a Gaussian posterior"):
        optimizer("gradsq", model, prior=3)
    run, data = Run("dp-sgd", 1, 1.0, 1.0, 0.1, 16), (torch.randn(N, 3), torch.randint(0, 2, (N,)))
    with pytest.raises(ArgumentError, match="is not used by 'dp-sgd'"):
        Stack([run], AnyNetwork(network), *data, prior=gaussian(model))


def test_the_tables_of_curvature_estimators_have_the_priors_damping() -> None:
    """In rows of a stack as in a list of tensors: an estimator that reads δ gets each weight's own."""
    from dpivon.optim.curvature import Evidence, estimate, resolve
    from dpivon.optim.tensors import TensorList

    g, h, d = (torch.rand(1, 6) + 0.1 for _ in range(3))
    shapes = [(2, 2), (1, 2)]

    def listed(t: Tensor) -> TensorList:
        return TensorList([part.view(s) for part, s in zip(t[0].split([4, 2]), ((2, 2), (2,)), strict=True)])

    facts = {"noise_variance": 0.0, "ess": 10.0, "batch_size": 4.0, "decay": 0.9, "t": 1}
    for name in ("reparam", "gradsq"):
        row = Evidence(g=g, g_squared=g.square(), g_perturbation=g, hess=h, weight_decay=d, **facts)
        both = Evidence(
            g=listed(g),
            g_squared=listed(g.square()),
            g_perturbation=listed(g),
            hess=listed(h),
            weight_decay=listed(d),
            **facts,
        )
        found = [estimate(resolve(name), row, shapes), estimate(resolve(name), both)]
        torch.testing.assert_close(found[0][0], torch.cat([t.flatten() for t in found[1]]))


def test_a_precise_prior_does_not_make_dp_steady_diverge() -> None:
    """δ = 1/(N v) may be larger than what the step divides by: the pull alone must not pass the prior's mean."""
    model = network()
    start = [p.detach().clone() for p in model.parameters()]
    named = {n: p.detach().clone() for n, p in model.named_parameters()}
    prior = Posterior(named, {n: torch.full_like(p, 1e-7) for n, p in named.items()})
    made = optimizer("steady", model, prior=prior)
    g = torch.Generator().manual_seed(3)
    for _ in range(20):
        for p in model.parameters():
            p.grad = 1e-3 * torch.randn(p.shape, generator=g)
        made.step()
    for p, q in zip(model.parameters(), start, strict=True):
        assert (p - q).abs().max() <= 1e-2 * N * 1e-7  # s̄/δ, with |s̄| well below 10 times the gradients
