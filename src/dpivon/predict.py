"""The posterior predictive p(y | x) = E_q[p(y | x, θ)], by Monte Carlo over draws θ_1 … θ_S from q: post-processing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, overload

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpivon.dropout import LiveDropout, is_live
from dpivon.errors import bad, check_choice, check_number, check_whole
from dpivon.posterior import Posterior, SampledPosterior, unwrap
from dpivon.shards import is_sharded
from dpivon.variational.layers import is_variational, plain

Likelihood = Literal["categorical", "bernoulli", "multilabel", "gaussian"]
Noise = float | Callable[[Tensor], tuple[Tensor, Tensor]] | None


@dataclass(frozen=True, eq=False)
class ClassPrediction:
    """p̄ = mean_s p_s, with its entropy split after Houlsby et al., 2011 (arXiv:1112.5745), in nats.

    ``entropy`` is H[p̄], the whole uncertainty; ``mutual_information`` is H[p̄] − mean_s H[p_s], the part
    that more data about θ would remove. ``samples`` is S, or 0 for one pass at the posterior mean. K labels: [N, K, …]."""

    probs: Tensor
    entropy: Tensor
    mutual_information: Tensor
    samples: int

    @property
    def label(self) -> Tensor:
        """The most probable class of each example."""
        return self.probs.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """The probability of that class."""
        return self.probs.amax(-1)


@dataclass(frozen=True, eq=False)
class RegressionPrediction:
    """The law of total variance over the S equally weighted draws: Var[y] = Var_s[μ_s] + mean_s[σ²_s].

    ``epistemic`` is Var_s[μ_s] (divided by S: the variance of the mixture itself), ``aleatoric`` is
    mean_s[σ²_s], and ``variance`` is their sum.
    """

    mean: Tensor
    variance: Tensor
    epistemic: Tensor
    aleatoric: Tensor


@overload
def predict(
    model: nn.Module,
    posterior: Posterior | SampledPosterior,
    x: Tensor | Iterable[Any],
    samples: int = ...,
    *,
    batch_size: int = ...,
    likelihood: Literal["categorical", "bernoulli", "multilabel"] = ...,
    noise_variance: Noise = ...,
    generator: torch.Generator | None = ...,
    device: torch.device | str | None = ...,
    dropout: bool | None = ...,
) -> ClassPrediction: ...


@overload
def predict(
    model: nn.Module,
    posterior: Posterior | SampledPosterior,
    x: Tensor | Iterable[Any],
    samples: int = ...,
    *,
    batch_size: int = ...,
    likelihood: Literal["gaussian"],
    noise_variance: Noise = ...,
    generator: torch.Generator | None = ...,
    device: torch.device | str | None = ...,
    dropout: bool | None = ...,
) -> RegressionPrediction: ...


def predict(
    model: nn.Module,
    posterior: Posterior | SampledPosterior,
    x: Tensor | Iterable[Any],
    samples: int = 32,
    *,
    batch_size: int = 512,
    likelihood: Likelihood = "categorical",
    noise_variance: Noise = None,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dropout: bool | None = None,
) -> ClassPrediction | RegressionPrediction:
    """Average ``model``'s predictions for ``x`` over ``samples`` draws from ``posterior``.

    >>> prediction = predict(model, optimizer.posterior(model), x)
    >>> prediction.probs, prediction.entropy, prediction.mutual_information

    Post-processing: it spends no privacy. Every batch sees the same draws, so the result does not depend on ``batch_size``; a
    draw does depend on the type of device it is made on. The network runs in eval mode; its parameters, buffers and training
    flags are left as they were, and results are on the device of the inputs.

    Args:
        model: the network. A variational model is used with whole weights, drawn as for the plain model.
        posterior: what the training left.
        x: a tensor, batch first, or an iterable of batches such as a DataLoader, read once. Of a batch that is a tuple or
            list the first element is the input; a mapping is passed as keyword arguments.
        samples: how many draws are averaged. 0, or a posterior without variance, is one pass at the posterior mean. Of a
            :class:`SampledPosterior` so many samples are chosen without replacement, or all if it has no more.
        batch_size: how many rows of a tensor go through the network at once.
        likelihood: what the model returns: ``"categorical"`` logits [B, C]; ``"bernoulli"`` one logit per example, for
            which ``probs`` is [N, 2]; ``"multilabel"`` logits [B, K], for which it is [N, K, 2]; ``"gaussian"`` the mean, or
            (mean, variance).
        noise_variance: the variance of a Gaussian likelihood whose model returns the mean alone, or a function of the
            model's output that returns mean and variance.
        generator: source of the draws; torch's global one if None.
        device: where the network runs; where it is, by default.
        dropout: whether the model's dropout is live, which is a draw of its own; by default it is if the posterior says so
            (:func:`dpivon.dropout.dropout_posterior`).
    """
    samples = check_whole("samples", samples, "Pass a whole number of draws, or 0 for the posterior mean")
    batch_size = check_whole("batch_size", batch_size, "Pass how many examples fit in memory", at_least=1)
    check_choice("likelihood", likelihood, get_args(Likelihood), "Name one of them")
    if noise_variance is not None and likelihood != "gaussian":
        fix = 'Leave it out, or pass likelihood="gaussian"'
        raise bad("noise_variance", noise_variance, f"has no meaning for likelihood={likelihood!r}", fix)
    if noise_variance is not None and not callable(noise_variance):
        noise_variance = check_number("noise_variance", noise_variance, "Pass a variance", above=0)

    draws = _Draws(_network(model), posterior, samples, generator, device, dropout)
    with torch.no_grad(), _eval_mode(draws.network):
        if likelihood == "gaussian":
            return _regression(_stream(draws, x, batch_size, lambda home: _Gaussian(home, noise_variance)))
        parts = _stream(draws, x, batch_size, lambda home: _Classes(home, likelihood))
        return _classification(parts, len(draws.seeds))


def _network(model: nn.Module) -> nn.Module:
    if any(is_sharded(p) for p in model.parameters()):
        problem = "is sharded: its layers are gathered from their own weights, and would not take the posterior's"
        raise bad("model", type(model).__name__, problem, "Build the plain network and predict with that")
    return plain(model) if is_variational(model) else unwrap(model)


#: One network: its weights as a complete set of tensors, and the seed of its dropout masks if dropout is live.
_Draw = tuple[dict[str, Tensor], int | None]


class _Draws:
    """The draws θ_1 … θ_S for a functional call, made again from their seeds each time."""

    def __init__(
        self,
        network: nn.Module,
        posterior: Any,
        samples: int,
        generator: torch.Generator | None,
        device: torch.device | str | None,
        dropout: bool | None,
    ) -> None:
        params = dict(network.named_parameters())
        if not isinstance(posterior, Posterior | SampledPosterior):
            fix = "Pass optimizer.posterior(), or Posterior.point(model) for the weights as they are"
            raise bad("posterior", type(posterior).__name__, "is no posterior", fix)
        self.network = network
        self.device = torch.device(device) if device is not None else next(iter(params.values())).device
        self.q = posterior.for_model(network).to(self.device)
        self.mean = self.q.mean
        self.dtypes = {name: params[name].dtype for name in self.mean}
        # Buffers are cloned because some layers update theirs in place even in eval mode.
        self.fixed = {name: b.detach().to(self.device, copy=True) for name, b in network.named_buffers()}
        self.fixed |= {name: p.detach().to(self.device) for name, p in params.items() if name not in self.mean}
        live = is_live(posterior) if dropout is None else dropout
        self.masks = LiveDropout(network) if live and samples else None
        self.seeds: list[int] = []
        home = generator.device if generator is not None else None
        if isinstance(self.q, SampledPosterior):
            order = torch.randperm(len(self.q), generator=generator, device=home) if samples < len(self.q) else None
            self.chosen = list(range(len(self.q))) if order is None else sorted(order[:samples].tolist())
            samples = len(self.chosen)
        if self.masks is not None or any(bool(v.any()) for v in self.q.variance.values()):
            self.seeds = torch.randint(2**63 - 1, (samples,), generator=generator, device=home).tolist()

    def __iter__(self) -> Iterator[_Draw]:
        if not self.seeds:
            yield self._complete(self.mean), None
        for i, seed in enumerate(self.seeds):
            if isinstance(self.q, SampledPosterior):
                theta = self.q[self.chosen[i]]
            else:
                theta = self.q.sample(torch.Generator(self.device).manual_seed(seed))
            yield self._complete(theta), seed

    def _complete(self, theta: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.fixed | {name: t.to(self.dtypes[name]) for name, t in theta.items()}

    def forward(self, draw: _Draw, batch: Tensor | Mapping[str, Any]) -> Any:
        theta, seed = draw
        with nullcontext() if self.masks is None or seed is None else self.masks.draw(seed, self.device):
            if isinstance(batch, Tensor):
                output = functional_call(self.network, theta, (batch.to(self.device),))
            else:
                given = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
                output = functional_call(self.network, theta, (), given)
        # Hugging Face models return a record whose .logits is what the others return bare.
        return getattr(output, "logits", output)


def _stream(
    draws: _Draws, x: Tensor | Iterable[Any], batch_size: int, start: Callable[[torch.device], _PartT]
) -> list[_PartT]:
    """One running sum per batch: only these, and one draw's output for one batch, are ever in memory."""
    parts: list[_PartT] = []
    if isinstance(x, Tensor):
        if x.ndim == 0 or len(x) == 0:
            raise bad("x.shape", tuple(x.shape), "has no examples", "Pass at least one example, batch first")
        batches = [x[i : i + batch_size] for i in range(0, len(x), batch_size)]
        parts = [start(x.device) for _ in batches]
        for draw in draws:
            for part, batch in zip(parts, batches, strict=True):
                part.add(draws.forward(draw, batch), len(batch))
        return parts
    if not isinstance(x, Iterable) or isinstance(x, str | bytes):
        raise bad("x", type(x).__name__, "is not a tensor or an iterable of batches", "Pass one of the two")
    # The draws are the inner loop: a shuffling loader gives its examples in a new order on every pass.
    for item in [x] if isinstance(x, Mapping) else x:
        inputs, leading = _inputs(item)
        part = start(leading.device)
        for draw in draws:
            part.add(draws.forward(draw, inputs), len(leading))
        parts.append(part)
    if not parts:
        raise bad("x", type(x).__name__, "has no batches", "Pass at least one batch")
    return parts


def _inputs(item: Any) -> tuple[Tensor | Mapping[str, Any], Tensor]:
    """What the network is called on, and a tensor of it that tells the batch's length and device."""
    if isinstance(item, Sequence) and not isinstance(item, str | bytes) and len(item) > 0:
        item = item[0]
    if isinstance(item, Tensor) and item.ndim > 0:
        return item, item
    if isinstance(item, Mapping):
        for value in item.values():
            if isinstance(value, Tensor) and value.ndim > 0:
                return item, value
    fix = "Let each batch be a tensor, a tuple or list that starts with one, or a mapping of tensors"
    raise bad("x", type(item).__name__, "is not a batch of inputs", fix)


@contextmanager
def _eval_mode(network: nn.Module) -> Iterator[None]:
    # Not by .eval(): some networks override it, and a layer kept in eval mode during training has to stay there.
    flags = [(module, module.training) for module in network.modules()]
    try:
        for module, _ in flags:
            module.training = False
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def _wide(t: Tensor) -> Tensor:
    """In float64, so that sums of a thousand draws are exact to float32; Apple GPUs have none."""
    return t.to(torch.float32 if t.device.type == "mps" else torch.float64)


class _Classes:
    """Σ_s p_s and Σ_s H[p_s] for one batch."""

    def __init__(self, home: torch.device, likelihood: str) -> None:
        self.home, self.likelihood, self.count = home, likelihood, 0
        self.p: Any = 0
        self.h: Any = 0

    def add(self, output: Any, examples: int) -> None:
        f_s = _wide(self._logits(output, examples))
        # Not torch.softmax: on a CPU it wakes every thread even for a handful of rows.
        p_s = (f_s - f_s.logsumexp(-1, keepdim=True)).exp()
        self.p, self.h = self.p + p_s.to(self.home), self.h + entropy(p_s).to(self.home)
        self.count += 1
        self.dtype = torch.promote_types(output.dtype, torch.float32)

    def _logits(self, output: Any, examples: int) -> Tensor:
        f = _tensor(output)
        if self.likelihood == "bernoulli":
            if tuple(f.shape) not in ((examples,), (examples, 1)):
                problem = f"is not one logit for each of the batch's {examples} examples"
                fix = 'Return shape [B] or [B, 1], or pass likelihood="categorical"'
                raise bad("model output shape", tuple(f.shape), problem, fix)
            f = f.reshape(examples)
            return torch.stack([torch.zeros_like(f), f], dim=-1)
        if f.ndim != 2 or f.shape[0] != examples or f.shape[1] < 2:
            problem = f"is not [{examples}, C] with at least two classes or labels"
            fix = 'Return one logit per class, or pass the likelihood ("bernoulli" or "gaussian") it is for'
            raise bad("model output shape", tuple(f.shape), problem, fix)
        return torch.stack([torch.zeros_like(f), f], dim=-1) if self.likelihood == "multilabel" else f


class _Gaussian:
    """The mean of μ_s, Σ_s (μ_s − mean)² by Welford's update, and Σ_s σ²_s for one batch."""

    def __init__(self, home: torch.device, noise_variance: Noise) -> None:
        self.home, self.noise_variance, self.count = home, noise_variance, 0
        self.mean: Any = 0
        self.square: Any = 0
        self.noise: Any = 0

    def add(self, output: Any, examples: int) -> None:
        mu, sigma2 = self._moments(output)
        if mu.ndim == 0 or mu.shape[0] != examples:
            problem = f"is not batch first with {examples} examples"
            raise bad("model output shape", tuple(mu.shape), problem, "Return one mean per example")
        self.dtype = torch.promote_types(mu.dtype, torch.float32)
        mu, sigma2 = _wide(mu).to(self.home), _wide(sigma2).to(self.home)
        self.count += 1
        difference = mu - self.mean
        self.mean = self.mean + difference / self.count
        self.square = self.square + difference * (mu - self.mean)
        self.noise = self.noise + sigma2

    def _moments(self, output: Any) -> tuple[Tensor, Tensor]:
        if callable(self.noise_variance):
            return self.noise_variance(_tensor(output))
        if self.noise_variance is not None:
            if not isinstance(output, Tensor):
                fix = "Pass noise_variance=None to use the variance that the model returns"
                problem = f"was given, but the model returns {type(output).__name__} and not one tensor"
                raise bad("noise_variance", self.noise_variance, problem, fix)
            return output, torch.full_like(output, self.noise_variance)
        if not isinstance(output, Sequence) or len(output) != 2:
            problem = f"needs a model that returns (mean, variance), and this one returns {type(output).__name__}"
            raise bad("noise_variance", None, problem, "Pass the variance of the noise as a positive number")
        mu, sigma2 = _tensor(output[0]), _tensor(output[1])
        if mu.shape != sigma2.shape:
            problem = f"differs from the mean's shape {tuple(mu.shape)}"
            raise bad("model variance shape", tuple(sigma2.shape), problem, "Return one variance per mean")
        if bool((sigma2 < 0).any()):
            fix = "Return variances, for instance through softplus, not log-variances"
            raise bad("model variance", float(sigma2.min()), "must be at least 0", fix)
        return mu, sigma2


_PartT = TypeVar("_PartT", _Classes, _Gaussian)


def _classification(parts: list[_Classes], samples: int) -> ClassPrediction:
    probs = torch.cat([part.p / part.count for part in parts])
    _check_finite(probs)
    return prediction_of(probs, torch.cat([part.h / part.count for part in parts]), samples, parts[0].dtype)


def prediction_of(probs: Tensor, expected: Tensor, samples: int, dtype: torch.dtype | None = None) -> ClassPrediction:
    """The prediction of p̄ = mean_s p_s and mean_s H[p_s], rounded to ``dtype`` last; its entropies are in double without."""
    total = entropy(probs)
    information = (total - expected).clamp_min(0)  # ≥ 0 by Jensen; rounding may disagree
    p, h, mutual = (t.to(dtype or t.dtype) for t in (probs, total, information))
    return ClassPrediction(p, h, mutual, samples)


def entropy(probs: Tensor) -> Tensor:
    """H[p] of each row in nats, in double: the mutual information is a small difference of two."""
    return torch.special.entr(_wide(probs)).sum(-1)


def _regression(parts: list[_Gaussian]) -> RegressionPrediction:
    mean = torch.cat([part.mean for part in parts])
    epistemic = torch.cat([part.square / part.count for part in parts])
    aleatoric = torch.cat([part.noise / part.count for part in parts])
    _check_finite(mean + epistemic + aleatoric)
    found = (mean, epistemic + aleatoric, epistemic, aleatoric)
    return RegressionPrediction(*(t.to(parts[0].dtype) for t in found))


def _tensor(output: Any) -> Tensor:
    if not isinstance(output, Tensor) or not output.is_floating_point():
        fix = "Pass a network whose forward returns one floating-point tensor"
        raise bad("model output", type(output).__name__, "is not a floating-point tensor", fix)
    return output


def _check_finite(outputs: Tensor) -> None:
    finite = torch.isfinite(outputs)
    if not bool(finite.all()):
        fix = "Look for NaN in x, or train again with a smaller learning rate"
        bad_rows = int((~finite).flatten(1).any(-1).sum()) if finite.ndim > 1 else int((~finite).sum())
        raise bad("predictions", f"{bad_rows} of {len(outputs)}", "are infinite or NaN", fix)
