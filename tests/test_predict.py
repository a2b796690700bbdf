"""The Monte Carlo predictive agrees with closed forms and brute force, and leaves the network as it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from dpivon.errors import ArgumentError
from dpivon.posterior import Posterior
from dpivon.predict import ClassPrediction, RegressionPrediction, predict


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spread(model: nn.Module, variance: float) -> Posterior:
    q = Posterior.point(model)
    return Posterior(q.mean, {name: torch.full_like(m, variance) for name, m in q.mean.items()})


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4))


X = torch.randn(50, 3, generator=seeded(5))


def test_linear_gaussian_model_against_the_closed_form() -> None:
    """f(x) = xᵀw with w ~ N(m, Σ): E = xᵀm, Var = xᵀΣx + σ²."""
    m, v = torch.tensor([[1.0, -2.0, 0.5]]), torch.tensor([[0.3, 0.1, 0.8]])
    s = 4000
    model = nn.Linear(3, 1, bias=False)
    q = Posterior({"weight": m}, {"weight": v})
    r = predict(model, q, X, s, likelihood="gaussian", noise_variance=0.25, generator=seeded())
    assert isinstance(r, RegressionPrediction)
    variance = X.square() @ v.T
    assert torch.all((r.mean - X @ m.T).abs() < 5 * (variance / s).sqrt())
    assert torch.all((r.epistemic / variance - 1).abs() < 5 * math.sqrt(2 / s))
    assert torch.equal(r.aleatoric, torch.full((50, 1), 0.25))
    torch.testing.assert_close(r.variance, r.epistemic + r.aleatoric)


def test_logistic_model_against_quadrature() -> None:
    """f ~ N(μ, τ²) for one weight: E[σ(f)] is a one-dimensional integral."""
    model = nn.Linear(1, 1, bias=False)
    q = Posterior({"weight": torch.tensor([[0.7]])}, {"weight": torch.tensor([[2.0]])})
    x = torch.tensor([[-2.0], [0.0], [0.5], [3.0]])
    s = 5000
    r = predict(model, q, x, s, likelihood="bernoulli", generator=seeded())
    z = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    weight = torch.exp(-z.square() / 2)
    weight /= weight.sum()
    p = torch.sigmoid(x.double() * (0.7 + math.sqrt(2) * z)) @ weight
    assert r.probs.shape == (4, 2)
    assert torch.all((r.probs[:, 1] - p).abs() < 5 * 0.5 / math.sqrt(s))
    # MacKay's probit approximation is within a few hundredths of the integral, and so of the average.
    probit = torch.sigmoid(0.7 * x[:, 0] / torch.sqrt(1 + math.pi / 8 * 2 * x[:, 0].square()))
    assert torch.all((r.probs[:, 1] - probit).abs() < 0.05)


def test_classes_against_a_loop_over_the_same_draws() -> None:
    model = classifier()
    q = spread(model, 0.3)
    r = predict(model, q, X, 7, generator=seeded(9))
    seeds = torch.randint(2**63 - 1, (7,), generator=seeded(9)).tolist()
    model.eval()
    with torch.no_grad():
        draws = [q.sample(seeded(seed)) for seed in seeds]
        p_s = torch.stack([functional_call(model, d, (X,)).double().softmax(-1) for d in draws])
    p = p_s.mean(0)
    entropy = -(p * p.log()).sum(-1)
    information = (p_s * (p_s.log() - p.log())).sum(-1).mean(0)  # E KL(p_s ‖ p̄), the other way to write it
    torch.testing.assert_close(r.probs.double(), p, atol=1e-6, rtol=0)
    torch.testing.assert_close(r.entropy.double(), entropy, atol=1e-6, rtol=0)
    torch.testing.assert_close(r.mutual_information.double(), information, atol=1e-6, rtol=0)
    assert r.samples == 7
    assert torch.equal(r.label, p.argmax(-1))
    torch.testing.assert_close(r.confidence.double(), p.max(-1).values, atol=1e-6, rtol=0)


def test_a_thousand_draws_with_a_large_offset_keep_their_variance() -> None:
    """Σμ² − (Σμ)²/S would lose everything here: the mean is 10⁴ and the deviation 10⁻²."""
    model = nn.Linear(1, 1, bias=False).double()
    q = Posterior({"weight": torch.tensor([[1e4]]).double()}, {"weight": torch.tensor([[1e-4]]).double()})
    x = torch.ones(1, 1).double()
    r = predict(model, q, x, 1000, likelihood="gaussian", noise_variance=1, generator=seeded(2))
    seeds = torch.randint(2**63 - 1, (1000,), generator=seeded(2)).tolist()
    draws = torch.stack([q.sample(seeded(s))["weight"] for s in seeds])
    assert r.mean.dtype == torch.float64
    assert float(r.epistemic / draws.var(correction=0)) == pytest.approx(1, abs=1e-6)
    assert float(r.mean) == pytest.approx(float(draws.mean()), rel=1e-12)


@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_the_result_does_not_depend_on_how_inputs_are_batched(likelihood: Any) -> None:
    model = classifier()
    q = spread(model, 0.3)
    noise = 0.1 if likelihood == "gaussian" else None

    def run(x: Any, batch_size: int = 512) -> Tensor:
        options: dict[str, Any] = {"likelihood": likelihood, "noise_variance": noise}
        r: Any = predict(model, q, x, 5, batch_size=batch_size, generator=seeded(4), **options)
        return torch.cat([r.probs, r.mutual_information[:, None]] if noise is None else [r.mean, r.epistemic], -1)

    def close(a: Tensor) -> None:
        torch.testing.assert_close(a, whole, atol=1e-6, rtol=1e-5)

    whole = run(X)
    for batch_size in (1, 7, 50):
        close(run(X, batch_size))
    close(run(DataLoader(TensorDataset(X, torch.zeros(50)), batch_size=8)))
    close(run([X[:20], X[20:]]))
    close(run(batch for batch in ([X[:20]], (X[20:], None))))
    close(run([{"input": X[:20]}, {"input": X[20:]}]))


def test_mappings_are_keyword_arguments_and_logits_are_found_in_records() -> None:
    class Record:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, *, inputs: Tensor, scale: float) -> Record:
            return Record(self.linear(inputs) * scale)

    model = Net()
    q = Posterior.point(model)
    expected = (model.linear(X) * 2).softmax(-1)
    for x in (
        {"scale": 2.0, "inputs": X},
        [{"inputs": X[:9], "scale": 2}, ({"inputs": X[9:], "scale": 2}, 0)],
    ):
        torch.testing.assert_close(predict(model, q, x).probs, expected)


def test_the_mean_is_one_pass_and_has_no_mutual_information() -> None:
    model = classifier()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    at_mean = predict(model, spread(model, 0.3), X, 0)
    point = predict(model, Posterior.point(model), X, 32)
    assert len(calls) == 2
    model.eval()
    expected = model(X).softmax(-1)
    for r in (at_mean, point):
        torch.testing.assert_close(r.probs, expected)
        assert torch.equal(r.mutual_information, torch.zeros(50))
        assert r.samples == 0


def test_generators_reproduce_and_differ() -> None:
    model = classifier()
    q = spread(model, 0.3)
    a, b, c = (predict(model, q, X, 3, generator=seeded(s)).probs for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    torch.manual_seed(0)
    d = predict(model, q, X, 3).probs
    torch.manual_seed(0)
    assert torch.equal(d, predict(model, q, X, 3).probs)


@given(st.integers(0, 1000), st.floats(0.0, 30.0), st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_class_predictions_are_within_their_bounds(seed: int, variance: float, samples: int) -> None:
    model = nn.Linear(3, 5)
    r = predict(model, spread(model, variance), X, samples, generator=seeded(seed))
    torch.testing.assert_close(r.probs.sum(-1), torch.ones(50))
    assert torch.all(r.mutual_information >= 0)
    assert torch.all(r.mutual_information <= r.entropy + 1e-6)
    assert torch.all(r.entropy <= math.log(5) + 1e-6)
    assert torch.all(r.mutual_information <= math.log(samples) + 1e-6)


def test_heteroscedastic_model_follows_the_law_of_total_variance() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x[:, 0] * self.w[0], torch.exp(self.w[1]).expand(len(x))

    model = Net()
    q = Posterior({"w": torch.tensor([1.0, -1.0])}, {"w": torch.tensor([0.5, 0.2])})
    s = 4000
    r = predict(model, q, X, s, likelihood="gaussian", generator=seeded())
    # E exp(w) of a log-normal, and its standard deviation for the Monte Carlo error
    mean_noise = math.exp(-1 + 0.1)
    spread_noise = mean_noise * math.sqrt(math.exp(0.2) - 1)
    assert torch.all((r.aleatoric - mean_noise).abs() < 5 * spread_noise / math.sqrt(s))
    assert torch.all((r.epistemic / (0.5 * X[:, 0].square()) - 1).abs() < 5 * math.sqrt(2 / s))
    torch.testing.assert_close(r.variance, r.epistemic + r.aleatoric)


def state(model: nn.Module) -> list[Any]:
    return [(k, v.clone()) for k, v in model.state_dict().items()]


@pytest.mark.parametrize("fails", [False, True])
def test_the_network_is_left_as_it_was(fails: bool) -> None:
    model = classifier().train()
    model[1].eval()  # a layer kept in eval mode on purpose
    flags = [m.training for m in model.modules()]
    before, pointers = state(model), [p.data_ptr() for p in model.parameters()]
    seen = []
    model[3].register_forward_hook(lambda m, *_: seen.append(m.training))
    if fails:
        with pytest.raises(RuntimeError, match="shape"):
            predict(model, spread(model, 0.3), [X, torch.zeros(2, 99)])
    else:
        predict(model, spread(model, 0.3), X)
    assert seen
    assert not any(seen)
    assert [m.training for m in model.modules()] == flags
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(before, state(model), strict=True))


def test_buffers_that_a_layer_writes_in_eval_mode_are_left_as_they_were() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, input: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(input)

    model = Counting()
    predict(model, spread(model, 1.0), X)
    assert float(model.calls) == 0


def test_eval_overrides_are_not_called() -> None:
    class Merging(nn.Linear):
        def train(self, mode: bool = True) -> Merging:
            raise AssertionError("the network's own train() was called")

    model = Merging(3, 2)
    assert predict(model, spread(model, 1.0), X).probs.shape == (50, 2)


def test_results_can_be_used_under_autograd() -> None:
    model = classifier()
    probs = predict(model, spread(model, 0.1), X, 2).probs
    w = torch.ones(4, requires_grad=True)
    (probs @ w).sum().backward()
    assert w.grad is not None


def test_frozen_parameters_and_buffers_come_from_the_model() -> None:
    model = classifier()
    model[0].requires_grad_(False)
    q = Posterior.point(model)
    with torch.no_grad():
        model[0].weight.mul_(2)
        model[1].running_mean.add_(1)
    model.eval()
    torch.testing.assert_close(predict(model, q, X).probs, model(X).softmax(-1))


def test_positional_posteriors_and_tied_weights() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    named = spread(model, 0.2)
    positional = Posterior(
        {str(i): m for i, m in enumerate(named.mean.values())},
        {str(i): v for i, v in enumerate(named.variance.values())},
    )
    assert list(named.mean) == ["0.weight", "0.bias", "1.bias"]
    r = predict(model, positional, X, 0)
    torch.testing.assert_close(r.probs, model(X).softmax(-1))
    named.mean["0.weight"].zero_()
    named.mean["0.bias"].zero_()
    # with the shared weight at zero only the last bias is left
    expected = model[1].bias.softmax(-1).expand(50, 3)
    torch.testing.assert_close(predict(model, named, X, 0).probs, expected)


def test_low_precision_models_run_in_their_own_and_report_in_float32() -> None:
    model = nn.Linear(3, 4).bfloat16()
    r = predict(model, spread(model, 0.1), X.bfloat16(), 4)
    assert r.probs.dtype == torch.float32
    torch.testing.assert_close(r.probs.sum(-1), torch.ones(50))


def test_recurrent_networks_see_the_draw() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.lstm(x)[0][:, -1]
            return out

    model = Net()
    q = Posterior.point(model)
    for m in q.mean.values():
        m.zero_()
    r = predict(model, q, torch.randn(4, 5, 3, generator=seeded()))
    assert torch.equal(r.probs, torch.full((4, 2), 0.5))


def test_a_model_inside_opacus() -> None:
    from opacus.grad_sample import GradSampleModule

    inner = nn.Sequential(nn.Linear(3, 4))
    model = GradSampleModule(inner)
    q = spread(inner, 0.2)
    wrapped = predict(model, q, X, 3, generator=seeded(1))
    assert torch.equal(wrapped.probs, predict(inner, q, X, 3, generator=seeded(1)).probs)
    assert model.training
    assert all(not getattr(m, "activations", []) for m in inner.modules())


def test_impossible_classes_have_no_entropy_but_nan_is_an_error() -> None:
    class Masked(nn.Linear):
        fill = -math.inf

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).index_fill(1, torch.tensor([0]), self.fill)

    model = Masked(3, 3)
    r = predict(model, spread(model, 0.1), X, 3)
    assert torch.equal(r.probs[:, 0], torch.zeros(50))
    assert torch.isfinite(r.entropy).all()
    model.fill = math.nan
    with pytest.raises(ArgumentError, match=r"50 of 50.*NaN"):
        predict(model, spread(model, 0.1), X, 3)


class Fixed(nn.Module):
    """A network that returns what it is told to."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output


def test_bernoulli_is_the_two_class_softmax() -> None:
    f = torch.linspace(-40, 40, 50)
    for output in (f, f[:, None]):
        model = Fixed(output)
        r = predict(model, Posterior.point(model), X, likelihood="bernoulli")
        assert isinstance(r, ClassPrediction)
        torch.testing.assert_close(r.probs[:, 1], f.sigmoid())
        torch.testing.assert_close(r.probs[:, 0], (-f).sigmoid())
