"""Losses of which every example has its own part, whatever the others are.

A mean is undone before gradients are clipped (``gradients/means.py``), so it must divide by just the rows. torch's
``weight=`` and ``ignore_index=`` divide by the weight of the labels that happen to be in the batch: then one example
rescales the gradients of all others before they are clipped, and the sum may move by several C. Three lines of defence:

- :class:`PerExampleLoss` makes any such loss safe: one loss per example, and the mean is ours.
- A loss that is handed over, as ``make_private(criterion=…)`` or ``engine.check(loss_fn)``, is tried on made-up numbers.
- :class:`LossWatch` looks at the graph of every backward that reaches the model's output, and refuses torch's own
  weighted means in it, also where the loss was never handed over. It reads the graph's structure and no value, so its
  answer says nothing about the data. It cannot see through a division the caller wrote out by hand: ``engine.check`` does.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.errors import DpivonError, PrivacyError, bad, check_choice
from dpivon.privacy.gradients.means import MEAN, intercept_backward, losses_under_way, walk
from dpivon.privacy.gradients.model_io import tensors_in
from dpivon.privacy.made_up import Kind, NotTried, made_up, some_rows

_NLL = "NllLoss"  # how its names of those nodes begin
_DEFAULT_IGNORE = -100
_CHECKED = "_CheckedBackward"
_FIX = "Use dpivon.PerExampleLoss(loss), which takes the plain mean of weighted losses"


class PerExampleLoss:
    """``criterion`` with a mean (or sum) over examples in which none of them changes the part of another.

    >>> loss_fn = dpivon.PerExampleLoss(nn.CrossEntropyLoss(weight=class_weights, ignore_index=-1))
    >>> loss_fn(model(x), y).backward()

    L = (1/B) Σ_i ℓ_i, where ℓ_i is the criterion's loss of example i alone (its weight in it, 0 if its label is ignored;
    the mean over its own elements if it has several) and B the rows of the batch. ``criterion`` is a module or a function
    with a ``reduction``, or one that returns one loss an example. Before its first use it is tried on made-up
    numbers: one whose losses depend on other rows is refused.

    Args:
        criterion: the loss to make safe.
        loss_reduction: ``"mean"`` or ``"sum"``, as given to ``make_private``.
    """

    def __init__(self, criterion: Callable[..., Any], loss_reduction: str = "mean") -> None:
        if not callable(criterion):
            raise bad("criterion", criterion, "is not a loss", "Pass a loss such as nn.CrossEntropyLoss()")
        self.loss_reduction = self.reduction = check_choice(
            "loss_reduction", loss_reduction, ("mean", "sum"), "Use the one given to make_private"
        )
        self._losses = _each(criterion)
        self._tried = False

    def __call__(self, outputs: Tensor, *targets: Any) -> Tensor:
        if not self._tried:
            check_rows(self.per_example, outputs, *targets)
            self._tried = True
        losses = self.per_example(outputs, *targets)
        if self.reduction == "none":
            return losses
        total = losses.sum() / max(len(losses), 1) if self.loss_reduction == "mean" else losses.sum()
        checked: Tensor = _Checked.apply(total)  # type: ignore[no-untyped-call]
        return checked

    def per_example(self, outputs: Tensor, *targets: Any) -> Tensor:
        """[B], one loss an example: also the ``loss`` that :func:`dpivon.fit` takes."""
        losses = self._losses(outputs, *targets)
        if not isinstance(losses, Tensor) or losses.dim() == 0 or len(losses) != len(outputs):
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise bad("criterion", shape, f"is not one loss for each of {len(outputs)} rows", "Honour reduction='none'")
        if losses.dim() == 1:
            return losses
        each = losses.flatten(1)
        return each.mean(1) if self.loss_reduction == "mean" else each.sum(1)


def _each(criterion: Any) -> Callable[..., Any]:
    """The criterion without its reduction."""
    if isinstance(getattr(criterion, "reduction", None), str):
        alone = copy.copy(criterion)
        alone.reduction = "none"
        return alone
    try:
        known = inspect.signature(criterion).parameters
    except (TypeError, ValueError):
        known = {}  # type: ignore[assignment]
    if "reduction" in known:
        return lambda *args: criterion(*args, reduction="none")
    return criterion


def one_each(loss: Callable[..., Any]) -> Callable[..., Tensor]:
    """``loss(outputs, labels)``, refused if it returns anything but one loss an example."""

    def checked(outputs: Tensor, labels: Tensor) -> Tensor:
        losses = loss(outputs, labels)
        if not isinstance(losses, Tensor) or losses.shape != (len(outputs),):
            name = getattr(loss, "__name__", type(loss).__name__)
            shape = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
            fix = f"Use reduction='none', or dpivon.PerExampleLoss({name}).per_example"
            raise bad("loss", name, f"returned {shape} where one loss an example is required", fix)
        return losses

    return checked


class _Checked(torch.autograd.Function):
    """The same number. Its node in the graph says that the loss was tried."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def check_rows(losses: Callable[..., Any], outputs: Tensor, *targets: Any) -> None:
    """Refuse losses of a row that depend on another row. Tried on made-up outputs and targets, never on data.

    Only shapes and types of the arguments are used: three rows together must have the losses, and the gradients, that each
    has alone.
    """
    classes = outputs.shape[1] if outputs.dim() > 1 else 2
    name, reason = getattr(losses, "__name__", type(losses).__name__), ""
    for kind in (Kind(True, classes), Kind(False, 2), Kind(False, 1)):
        for dtype in (torch.float64, torch.float32):  # a loss with weights of its own wants theirs
            try:
                differs = _differ(losses, made_up((outputs, *targets), 3, len(outputs), 0, kind, dtype))
            except DpivonError:
                raise
            except Exception as error:  # the loss wants other numbers than these
                reason = reason or f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                continue
            if differs:
                raise PrivacyError(
                    f"loss={name}: the loss of one row depends on other rows (found on made-up numbers), so clipping would not "
                    "bound an example. Use a loss that looks at one example at a time."
                )
            return
    raise NotTried(
        f"loss={name}: could not be tried on made-up numbers ({reason}), so nothing shows that an example has its own loss. "
        "Let it take any numbers of its arguments' shapes and types."
    )


def _differ(losses: Callable[..., Any], rows: tuple[Any, ...]) -> bool:
    """Whether three rows together have other losses or gradients than each alone."""
    together = _with_gradient(losses, rows)
    for i in range(3):
        alone = _with_gradient(losses, some_rows(rows, [i], 3, 0))
        for whole, one in zip(together, alone, strict=True):
            if not torch.isfinite(one).all():
                raise ValueError("the loss is not finite")
            if not torch.allclose(whole[i], one[0], rtol=1e-4, atol=1e-6):
                return True
    return False


def _with_gradient(losses: Callable[..., Any], rows: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        outputs = rows[0].detach().requires_grad_()
        found = losses(outputs, *rows[1:])
        each = found.flatten(1).sum(1) if isinstance(found, Tensor) and found.dim() > 1 else found
        if not isinstance(each, Tensor) or each.shape != (len(outputs),):
            raise ValueError("there is not one loss per row")
        (gradient,) = torch.autograd.grad(each.sum(), outputs)
    return each.detach(), gradient


def check_criterion(criterion: Any, loss_reduction: str) -> None:
    """Refuse a criterion that does not fit ``loss_reduction``, or is known not to be separable."""
    if criterion is None:
        return
    reduction = getattr(criterion, "reduction", loss_reduction)
    if reduction != loss_reduction:
        raise bad(
            "criterion",
            criterion,
            f"has reduction={reduction!r} but loss_reduction={loss_reduction!r}",
            "Make the two equal",
        )
    if isinstance(criterion, PerExampleLoss) or loss_reduction != "mean":
        return
    if isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss):
        if criterion.weight is not None:
            raise bad("criterion", f"{criterion} with weight", _divides("the weights"), _FIX)
        if criterion.ignore_index != _DEFAULT_IGNORE:
            value = f"{type(criterion).__name__}(ignore_index={criterion.ignore_index})"
            raise bad("criterion", value, _divides("the number"), _FIX)
    elif moved := _companions_matter(criterion):
        raise bad("criterion", criterion, f"scales an example's gradient by {moved:.3g} when others change", _FIX)


def _divides(what: str) -> str:
    return f"its mean divides by {what} of the labels in the batch, so one example rescales all others before clipping"


def _companions_matter(criterion: Any) -> float | None:
    """By how much the gradient of row 0 changes with the other rows' outputs and labels, on made-up numbers; None if not."""
    generator = torch.Generator().manual_seed(0)
    outputs, values = ([torch.rand(6, 3, generator=generator) for _ in range(3)] for _ in range(2))
    for worlds in (outputs, values):
        for world in worlds:
            world[0] = worlds[0][0]  # the example itself stays as it is
    classes = [torch.tensor([0, *others]) for others in ((0, 0, 0, 0, 0), (1, 2, 1, 2, 1), (2, 2, 2, 2, 2))]
    columns = [[t[:, 0] for t in worlds] for worlds in (outputs, values)]
    for rows, targets in ((outputs, classes), (outputs, values), columns):
        try:
            found = [_slope(criterion, z, y) for z, y in zip(rows, targets, strict=True)]
        except Exception:  # it wants other shapes; the next kind, or nothing
            continue
        base = found[0].norm()
        changed = max(float((f - found[0]).norm()) for f in found)
        if float(base) > 0 and changed > 1e-4 * float(base):
            return 1.0 + changed / float(base)
        return None
    return None


def _slope(criterion: Any, rows: Tensor, target: Tensor) -> Tensor:
    leaf = rows.clone().requires_grad_()
    with torch.enable_grad():
        loss = criterion(leaf, target)
        (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient[0]


class WeightedLossError(PrivacyError):
    """A mean that divides by what the labels of the batch weigh."""


class LossWatch:
    """Refuses a backward into a private model's output through one of torch's weighted means, or through the wrong reduction.

    It reads what torch does not promise to keep: names in the graph, and the function that starts a backward. So it is
    tried on losses that it must refuse before it is relied on, and a backward whose losses it cannot find is refused.

    Attributes:
        checked: whether the loss of the last backward was a :class:`PerExampleLoss`, which was tried.
    """

    def __init__(self, loss_reduction: str = "mean", ignored: Callable[[], bool] = lambda: False) -> None:
        self.loss_reduction, self.ignored = loss_reduction, ignored
        self.checked = False
        check_watch()

    def watch(self, output: Any) -> None:
        """Look at the backward that will reach this output of the model."""
        for z in tensors_in(output):
            if z.grad_fn is not None:
                z.register_hook(_Look(z, self))


@functools.cache
def check_watch() -> None:
    """Refuse a torch in which weighted losses would pass unseen. Made-up numbers; once a process."""
    intercept_backward()
    labels, weight = torch.tensor([0, 1]), torch.tensor([1.0, 2.0])
    for options in ({"weight": weight}, {"ignore_index": 1}):
        with torch.enable_grad():
            z = torch.zeros(2, 2, requires_grad=True) * 1.0
            z.register_hook(_Look(z))
            try:
                nn.functional.cross_entropy(z, labels, **options).backward()
            except WeightedLossError:
                continue
            except PrivacyError:  # it says itself that it sees nothing
                raise
            except Exception as error:
                raise _unseen(f"{type(error).__name__}: {error}") from error
        raise _unseen(f"a loss with {next(iter(options))}= passed unseen")


def _unseen(why: str) -> PrivacyError:
    return PrivacyError(
        f"torch={torch.__version__}: the losses of a backward cannot be inspected in it ({why}), so one example might rescale "
        "all others before clipping and nothing was released. Use a torch that dpivon was tested with."
    )


class _Look:
    def __init__(self, z: Tensor, watch: LossWatch | None = None) -> None:
        self._end = _name(z.grad_fn)  # not the node itself, which would make a ring of the graph
        self._watch = watch

    def __call__(self, g: Tensor) -> None:
        roots = [r.grad_fn for r in losses_under_way() if isinstance(r, Tensor)]
        if not roots:
            raise _unseen("the losses it began with are unknown")
        nodes = walk(roots, self._ends)
        ignored = self._watch is not None and self._watch.ignored()
        for node in nodes if not ignored else walk(roots):
            if not node.name().startswith(_NLL):
                continue
            # Else it is the loss of another model. A loss inside the model is above its output only if nothing ends the walk.
            if ignored or any(map(self._ends, walk([node], self._ends))):
                if node._saved_reduction == MEAN:
                    _check_nll(node, ignored=ignored)
                if self._watch is not None:
                    _check_reduction(node, nodes, self._watch.loss_reduction)
        if self._watch is not None:
            self._watch.checked = any(node.name() == _CHECKED for node in nodes)

    def _ends(self, node: Any) -> bool:
        return _name(node) == self._end


def _name(node: Any) -> tuple[str, int]:
    """What tells a node of the graph from all others: its number in the order of their making."""
    return node.name(), node._sequence_nr()


def _check_nll(node: Any, *, ignored: bool) -> None:
    index = int(node._saved_ignore_index)
    index = index - 2**64 if index >= 2**63 else index
    try:
        weighted = node._saved_weight is not None
    except RuntimeError:  # it was there, and is freed by now
        weighted = True
    if not weighted and index == _DEFAULT_IGNORE and not ignored:
        return
    what, value = ("weight", "given") if weighted else ("ignore_index", index)
    raise WeightedLossError(
        f"loss with {what}={value} and reduction='mean': {_divides('the weights' if weighted else 'the number')}, so nothing "
        f"was released. {_FIX}, or reduction='sum' with loss_reduction='sum'."
    )


def _check_reduction(node: Any, path: set[Any], loss_reduction: str) -> None:
    """A sum that nothing divides is no mean, and the reverse."""
    found = {0: "none", MEAN: "mean", 2: "sum"}[int(node._saved_reduction)]
    if found in ("none", loss_reduction) or any(n.name().startswith(("Div", "Mul", "Mean", "Sum")) for n in path):
        return
    raise PrivacyError(
        f"loss with reduction={found!r} under loss_reduction={loss_reduction!r}: gradients would be scaled by the size of the "
        f"batch, which one example changes, so nothing was released. Use loss_reduction={found!r} in make_private, or "
        f"reduction={loss_reduction!r} in the loss."
    )
