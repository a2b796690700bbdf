"""Shows that the rows of a batch are examples: a model does to rows together what it does to each of them alone.

Clipping bounds an example only if its row of every layer, and its part of the loss, depend on it alone. Before the first
release of a run, and whenever its inputs change their structure, the model is run on made-up inputs
(:mod:`dpivon.privacy.made_up`) in double precision: a few rows together, through the book-keeper; some in another order;
each alone, by plain autograd; and with one row poisoned by NaN. Norms, weighted sums, outputs, buffers, parameters and
attributes must agree. None of it is anyone's data, so neither is the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpivon.errors import DpivonError, PrivacyError
from dpivon.privacy.forward_watch import Attributes, different
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.gradients.model_io import rows_in, tensors_in
from dpivon.privacy.made_up import Kind, NotTried, kinds, made_up, poisoned, same_for_every_row, scaled, some_rows

EXAMPLES = 3
LOUD = 1e3  # times what made-up inputs usually are
MOST_ROWS = 256  # of a batch that outputs are compared in
#: How far results may differ, in units of what is compared, by the least precision that the model computes in.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
_FIX = {
    "model": "Keep every layer's rows in the order of the batch, and use layers that look at one row at a time",
    "loss": "Use a loss that is the plain mean or sum of one loss per example, such as dpivon.PerExampleLoss",
}

#: What is differentiated, from made-up inputs and which example each row is of: outputs that can be compared row by row, and
#: a loss.
Objective = Callable[[nn.Module, Any, list[int]], tuple[list[Tensor], Tensor]]


def check_model_rows(keeper: BookKeeper, args: Any, kwargs: Any, *, falls_back: bool = True) -> None:
    """Refuse a model whose rows depend on each other. ``args`` and ``kwargs`` say what its inputs look like.

    Where bare parameters were expanded and must not be, their modules run example by example from here on, if it may be so.
    """

    def objective(model: nn.Module, inputs: Any, rows: list[int]) -> tuple[list[Tensor], Tensor]:
        return _projected(keeper, model(*inputs[0], **inputs[1]), rows)

    given = next(t.shape[keeper.dim] for t in tensors_in((args, kwargs)) if t.dim() > keeper.dim)
    trial = _Trial(keeper, objective, (args, kwargs), given, "model")
    trial.run(falls_back=falls_back)
    keeper.breaks_with_ignored = not trial.holds_with_ignored()


def check_loss_rows(keeper: BookKeeper, loss_fn: Callable[[nn.Module, Any], Any], batch: Any) -> bool:
    """Refuse a loss in which one example changes the part of another, or that is not reduced as ``loss_reduction`` says.

    Returns:
        Whether that also holds where labels are -100, which torch's losses leave out of their mean.
    """

    def objective(model: nn.Module, inputs: Any, rows: list[int]) -> tuple[list[Tensor], Tensor]:
        loss = loss_fn(model, inputs)
        if not isinstance(loss, Tensor) or not loss.requires_grad or (loss.dim() and loss.shape != (len(rows),)):
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise PrivacyError(
                f"loss_fn returned {found} for {len(rows)} rows: it must return "
                "the loss of the batch, or one loss per example, computed from the model's output."
            )
        if not loss.dim():
            return [], loss
        return [loss], loss.mean() if keeper.loss_reduction == "mean" else loss.sum()

    trial = _Trial(keeper, objective, batch, rows_in(batch, keeper.dim), "loss")
    trial.run()
    return trial.holds_with_ignored()


@dataclass(frozen=True)
class _Outcome:
    outputs: list[Tensor]
    squares: Tensor  # ‖g_i‖² by example
    sums: dict[str, Tensor]  # Σ_i c_i g_i by parameter


def _projected(keeper: BookKeeper, output: Any, examples: list[int]) -> tuple[list[Tensor], Tensor]:
    """A random linear function of every row of a model's outputs, another for every example: the loss where none is given."""
    rows = len(examples)
    found = [z for z in tensors_in(output) if z.requires_grad and z.is_floating_point()]
    if not found:
        raise PrivacyError(
            f"The model {type(keeper.module).__name__} returned no tensor that depends on its parameters. Return "
            "tensors, or tuples, lists, dicts or objects that hold them."
        )
    by_row, total = [], found[0].new_zeros(())
    for i, z in enumerate(found):
        pooled = z.dim() == 2 and len(z) == rows  # [batch, classes], also where the inputs' batch is second
        if z.dim() > keeper.dim and z.shape[keeper.dim] == rows and not pooled:
            z = z.movedim(keeper.dim, 0)
        elif keeper.dim == 0 and z.dim() and len(z) and len(z) % rows == 0:  # [batch · positions, …]
            z = z.unflatten(0, (rows, -1))
        generator = torch.Generator(z.device).manual_seed(
            i
        )  # there, since a language model has 50,000 outputs per token
        single = z.dim() == 0 or len(z) != rows  # already reduced over the batch, or not of it
        shape = z.shape if single else z.shape[1:]
        each = torch.rand(shape, generator=generator, dtype=torch.float64, device=z.device) + 0.5
        parts = z * each.to(z)
        if not single:
            parts = parts.reshape(rows, -1).sum(1) * (1.0 + torch.tensor(examples, dtype=torch.float64)).to(z)
            by_row.append(z)
        value = parts.sum()
        total = total + (value / rows if not single and keeper.loss_reduction == "mean" else value)
    return by_row, total


@dataclass(frozen=True)
class _Trial:
    """What is tried (a model or a loss), and a value with the structure and the ``given`` rows of its inputs."""

    keeper: BookKeeper
    objective: Objective
    value: Any
    given: int
    what: str

    def run(self, *, falls_back: bool = True) -> None:
        """Refuse it unless rows together give what rows give alone, on the first made-up inputs that it takes.

        If it may be so, whatever was expanded to one per example, or saw other rows, runs example by example at the next try.
        """
        while True:
            try:
                return self._try()
            except DpivonError as error:
                if not falls_back or not self.keeper.watch_more_closely(error):
                    raise

    def _try(self) -> None:
        failures: list[Exception] = []
        for kind in kinds(self.keeper.module):
            for dtype in (torch.float32,) if self.keeper.sharded else (torch.float64, torch.float32):
                rehearsal = _Rehearsal(self, kind, dtype)
                try:
                    return rehearsal.run()
                except DpivonError:
                    raise
                except Exception as error:  # the model wants other numbers than these
                    failures.append(error)
        reason = " ".join(f"{type(failures[0]).__name__}: {failures[0]}".split())
        raise NotTried(
            f"The {self.what} could not be tried on made-up inputs ({reason[:300]}), so nothing shows that one row does not "
            "depend on another. Make it run on any numbers of its inputs' shapes and types, or pass unchecked=True to "
            "make_private if you know that no row depends on another; the ledger records that."
        )

    def holds_with_ignored(self) -> bool:
        """Whether rows are examples also where some integers are -100, as far as the model takes such numbers."""
        if self.keeper.sharded:
            return True
        integers = sum(not t.is_floating_point() and t.dtype != torch.bool for t in tensors_in(self.value))
        for place in range(integers):
            try:
                _Rehearsal(self, replace(kinds(self.keeper.module)[0], ignored=place), torch.float64).run()
            except PrivacyError:
                return False
            except Exception:  # those are no labels
                continue
        return True


class _Rehearsal:
    """One try, with one kind of made-up inputs."""

    def __init__(self, trial: _Trial, kind: Kind, dtype: torch.dtype) -> None:
        self._keeper = keeper = trial.keeper
        self._objective, self._what, self._given = trial.objective, trial.what, trial.given
        self._per_example = keeper.augmentations
        self._rows = EXAMPLES * self._per_example
        self._device = next(keeper.module.parameters()).device
        self._value = made_up(trial.value, self._rows, trial.given, keeper.dim, kind, dtype)
        self._dtype = self._lowered = dtype

    def run(self) -> None:
        keeper, modes = self._keeper, [(layer, layer.training) for layer in self._keeper.module.modules()]
        attributes = Attributes(keeper.module)
        try:
            with keeper.aside(), torch.enable_grad():
                if not keeper.module.training:
                    keeper.module.train()
                self._compare()
                self._check_attributes(attributes)
        finally:
            attributes.restore()
            for layer, training in modes:
                layer.training = training

    def _compare(self) -> None:
        everyone = list(range(EXAMPLES))
        weights = torch.linspace(0.5, 1.5, EXAMPLES, dtype=torch.float64, device=self._device)
        apart = [self._alone(i) for i in everyone]
        if not all(bool(torch.isfinite(t).all()) for o in apart for t in (*o.outputs, o.squares)):
            raise ValueError("the result is not finite")
        self._hold(self._together(everyone, weights), apart, everyone, weights)
        some = [EXAMPLES - 1, 0]
        self._hold(self._together(some, weights[:2]), apart, some, weights[:2])
        if self._what == "model" and not self._keeper.sharded:  # of which all ranks make the same passes
            self._compare_outputs([outcome.outputs for outcome in apart], everyone)

    def _compare_outputs(self, apart: list[list[Tensor]], everyone: list[int]) -> None:
        """Forward passes of what gradients would say no more about: a poisoned row, large numbers, a whole batch."""
        bad = poisoned(self._value, self._rows - 1, self._rows, self._keeper.dim)
        if bad is not None:
            outputs = self._pass(self._forward_alone, bad, self._of(everyone))
            self._hold_outputs(outputs, apart, everyone[:-1], "with NaN in another row, ")
            loud = scaled(self._value, LOUD, self._rows, self._keeper.dim)
            alone = [self._pass(self._forward_alone, self._some([i], loud), self._of([i])) for i in everyone]
            if all(bool(torch.isfinite(t).all()) for outputs in alone for t in outputs):
                outputs = self._pass(self._forward_alone, loud, self._of(everyone))
                self._hold_outputs(outputs, alone, everyone, "with large inputs, ")
        copies = max(1, min(self._given, MOST_ROWS) // self._rows)
        if copies > 1:
            many = some_rows(self._value, list(range(self._rows)) * copies, self._rows, self._keeper.dim)
            outputs = self._pass(self._forward_alone, many, self._of(everyone) * copies)
            self._hold_outputs(outputs, apart, everyone, "in a batch of the size that is trained with, ")

    # ---- passes

    def _together(self, examples: list[int], weights: Tensor) -> _Outcome:
        return self._pass(self._book_kept, self._some(examples), self._of(examples), weights)

    def _alone(self, example: int) -> _Outcome:
        if self._keeper.sharded:
            found = self._together([example], torch.ones(1, dtype=torch.float64, device=self._device))
            return replace(found, squares=found.squares[0])
        return self._pass(self._differentiated, self._some([example]), self._of([example]))

    def _of(self, examples: list[int]) -> list[int]:
        """Of which example each row is."""
        return [i for i in examples for _ in range(self._per_example)]

    def _some(self, examples: list[int], value: Any = None) -> Any:
        m = self._per_example
        index = [i * m + j for i in examples for j in range(m)]
        return some_rows(self._value if value is None else value, index, self._rows, self._keeper.dim)

    def _pass(self, kind: Callable[..., Any], *args: Any) -> Any:
        """Run with copies of parameters and buffers in the precision of the try, which the pass must leave as they are."""
        module = self._keeper.module
        if self._keeper.sharded:  # no rank has whole parameters to copy
            with same_for_every_row(self._device, self._keeper.dim):
                return kind(module, *args)
        tensors: dict[str, Tensor] = dict(module.named_parameters()) | dict(module.named_buffers())
        copies = {
            f"model.{name}": (t.detach().to(self._dtype) if t.is_floating_point() else t.detach()).clone()
            for name, t in tensors.items()
        }
        for name, t in tensors.items():
            copies[f"model.{name}"].requires_grad_(t.requires_grad)
        before = {name: (t, t._version, t.detach().clone()) for name, t in copies.items()}
        with same_for_every_row(self._device, self._keeper.dim) as randomness:
            outcome = functional_call(_Pass(module, kind), copies, args)
        self._lowered = randomness.lowered or self._lowered
        for name, (t, version, was) in before.items():
            if t._version != version or not torch.equal(t.detach(), was):
                raise PrivacyError(
                    f"{name.removeprefix('model.')!r} is changed by the model's forward, which would carry private data around "
                    "the mechanism. Remove what writes to it, such as max_norm or running statistics."
                )
        return outcome

    def _book_kept(self, model: nn.Module, inputs: Any, rows: list[int], weights: Tensor) -> _Outcome:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._keeper.clear()
        outputs, loss = self._objective(model, inputs, rows)
        loss.backward()
        squares, sums = self._keeper.norms_and_sums(list(trained.values()), weights)
        self._keeper.forget_passes()
        return _Outcome([z.detach() for z in outputs], squares, dict(zip(trained, sums, strict=True)))

    def _differentiated(self, model: nn.Module, inputs: Any, rows: list[int]) -> _Outcome:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        with self._keeper.unwatched():  # also where a checkpoint computes a forward again
            outputs, loss = self._objective(model, inputs, rows)
            found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        m = self._keeper.augmentations if self._keeper.loss_reduction == "sum" else 1
        share = 1.0 / (self._keeper.samples * m)
        sums = {
            n: torch.zeros_like(p) if g is None else g * share for (n, p), g in zip(trained.items(), found, strict=True)
        }
        squares = torch.stack([g.double().square().sum() for g in sums.values()]).sum()
        return _Outcome([z.detach() for z in outputs], squares, sums)

    def _forward_alone(self, model: nn.Module, inputs: Any, rows: list[int]) -> list[Tensor]:
        with self._keeper.unwatched():
            return [z.detach() for z in self._objective(model, inputs, rows)[0]]

    # ---- what must agree

    def _hold(self, found: _Outcome, apart: list[_Outcome], examples: list[int], weights: Tensor) -> None:
        self._hold_outputs(found.outputs, [outcome.outputs for outcome in apart], examples)
        limit = TOLERANCE[self._lowered]
        norms = torch.stack([apart[i].squares for i in examples]).sqrt()
        scale = (weights.to(norms) * norms).sum().clamp(min=1e-30)
        pairs = list(zip(weights.to(norms), examples, strict=True))
        worst: dict[str, float] = {}
        for name, total in found.sums.items():
            expected = torch.stack([c * apart[i].sums[name].to(norms) for c, i in pairs]).sum(0)
            worst[name] = float((total.to(norms) - expected).norm() / scale)
        name = max(worst, key=lambda key: worst[key])
        off = float(((found.squares.to(norms).clamp(min=0).sqrt() - norms).abs() / scale).max())
        if not max(worst[name], off) <= limit:
            raise PrivacyError(
                f"The {self._what} on made-up inputs: the gradient of {name!r} of one example is not what the example gives "
                f"alone (off by {max(worst[name], off):.2g} of it), so clipping would not bound an example. {_FIX[self._what]}."
            )

    def _hold_outputs(
        self, found: list[Tensor], apart: list[list[Tensor]], examples: list[int], when: str = ""
    ) -> None:
        m = self._per_example
        for k, z in enumerate(found):
            for place, i in enumerate(examples):
                if self._differ(z[place * m : (place + 1) * m], apart[i][k]):
                    raise PrivacyError(
                        f"The {self._what} on made-up inputs: {when}the result of one row depends on the other rows of its "
                        f"batch{self._seen_first()}, so clipping would not bound an example. {_FIX[self._what]}."
                    )

    def _differ(self, found: Tensor, alone: Tensor) -> bool:
        return not float((found - alone).norm()) <= TOLERANCE[self._lowered] * float(alone.norm().clamp(min=1.0))

    def _seen_first(self) -> str:
        """In which layer's output it is seen first that rows depend on each other."""
        if self._what != "model":
            return ""
        everyone, alone = (self._outputs_of_layers(some) for some in (list(range(EXAMPLES)), [EXAMPLES - 1]))
        m = self._per_example
        for (name, z), (_, a) in zip(everyone, alone, strict=False):
            if z.dim() and len(z) == self._rows and z[-m:].shape == a.shape and self._differ(z[-m:], a):
                return f", as the output of {name} shows first"
        return f" in {type(self._keeper.module).__name__}"

    def _outputs_of_layers(self, examples: list[int]) -> list[tuple[str, Tensor]]:
        found: list[tuple[str, Tensor]] = []

        def note(layer: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                found.append((self._keeper.named(layer), output.detach()))

        handles = [layer.register_forward_hook(note) for layer in self._keeper.module.modules()]
        try:
            self._pass(self._forward_alone, self._some(examples), self._of(examples))
        finally:
            for handle in handles:
                handle.remove()
        return found

    def _check_attributes(self, attributes: Attributes) -> None:
        """What the model keeps from a batch must not depend on it, nor change what the model does afterwards."""
        if self._what != "model" or self._keeper.sharded:
            return
        module, probe = self._keeper.module, self._some([0])
        kept, heard = [], []
        for example in (1, 2):
            attributes.restore()
            with torch.no_grad():
                self._pass(self._forward_quietly, self._some([example]))
                kept.append(attributes.state())
                results = self._pass(self._forward_quietly, probe)
                module.eval()
                results += self._pass(self._forward_quietly, probe)
                module.train()
            heard.append(results)
        names = different(*kept)
        if names or not all(torch.equal(a, b) for a, b in zip(*heard, strict=True)):
            what = names[0] if names else "something"
            raise PrivacyError(
                f"The model keeps {what!r} from the batches it sees, which would carry private data around the mechanism. "
                "Return it from forward instead, or compute it from public data and freeze it."
            )

    def _forward_quietly(self, model: nn.Module, inputs: Any) -> list[Tensor]:
        args, kwargs = inputs
        return [z.detach() for z in tensors_in(model(*args, **kwargs))]


class _Pass(nn.Module):
    """A pass over a model whose parameters are put in from outside."""

    def __init__(self, model: nn.Module, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self._kind = model, kind

    def forward(self, *args: Any) -> Any:
        return self._kind(self.model, *args)
