"""The mean over a batch, undone without rounding.

A caller's mean loss divides by the rows B of the batch, and clipping wants every example's own loss. Multiplied by B
afterwards, everyone's gradient would be rounded by the size of the batch: where an example's terms nearly cancel, removing
one example would move all others. So just before a backward starts, the nodes of its graph that divide by B are found, and
give for that backward the gradient of the sum instead: what follows never depends on B.

Where no such nodes lie between the loss and the model's outputs (a mean in another form, a parameter of the caller's behind
it), gradients are multiplied by B when they reach the model.
"""

from __future__ import annotations

import functools
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dpivon.errors import PrivacyWarning
from dpivon.privacy.precision import ALIGNED, capturing, padded_empty, wide, without_autocast

Node = Any
#: From the gradient of a node's output to that of its input, times the rows of the batch.
_Rule = Callable[[Tensor], Tensor]
MEAN = 1  # torch's code for reduction="mean" in the nodes of its graph
_SUM = 2
_ELEMENTWISE = (
    *("MseLoss", "SmoothL1Loss", "HuberLoss", "SoftMarginLoss"),
    *("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"),
)
_OF_CLASSES = ("NllLoss", "NllLoss2D", "MultiMarginLoss")

_alive: weakref.WeakSet[Any] = weakref.WeakSet()  # outputs of private models that a backward may reach
_under_way: dict[int, list[Any]] = {}  # with what each thread has started a backward


class UndoneMean(torch.autograd.Function):
    """The same numbers, with their gradient multiplied by the rows of the batch unless the mean was undone before."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, rows: int) -> Tensor:
        ctx.rows, ctx.undone = rows, False
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        if ctx.undone:
            return g, None
        if ctx.rows > 1 and not torch.compiler.is_compiling():
            _say_that_it_is_rounded()
        return g * ctx.rows, None


@functools.cache
def _say_that_it_is_rounded() -> None:
    """Warn, once per process, of a mean that is undone by multiplication."""
    warnings.warn(
        "A mean loss was undone in single precision: the size of the batch then rounds every example's gradient, and where "
        "an example's terms nearly cancel, one example may move the sum by more than C (docs/threat-model.md). Use "
        "dpivon.PerExampleLoss, a mean loss of torch's, .mean(), or loss_reduction='sum'.",
        PrivacyWarning,
        stacklevel=3,
    )


def undo_mean(z: Tensor, rows: int) -> Tensor:
    """An output of a model whose gradient under a mean loss is that of the sum over the rows."""
    undone: Tensor = UndoneMean.apply(z, rows)  # type: ignore[no-untyped-call]
    if isinstance(undone.grad_fn, UndoneMean._backward_cls):  # and not a compiler's
        _alive.add(undone.grad_fn)
    return undone


class Widened(torch.autograd.Function):
    """z in fp32. Its gradient goes back in bf16, with columns of zeros behind it up to a multiple of eight, which tensor cores
    want: of a head of 50,257 tokens they would otherwise be added by another copy."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.float()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # with create_graph=True
            return g.to(torch.bfloat16)
        return padded_empty(g.shape, g).copy_(g)


def loss_of_each(z: Tensor, rows: int | None) -> Tensor:
    """An output of the model whose gradient is that of every example's own loss; ``rows`` undoes the mean of the losses.

    In fp32 or better, and before any layer's backward: in bf16, 1/B would round everyone's gradient by the size of the batch.
    """
    if not z.requires_grad or not z.is_floating_point():
        return z
    if z.dtype == torch.bfloat16 and z.is_cuda and z.dim() > 1 and z.shape[-1] % ALIGNED and not capturing():
        z = Widened.apply(z)  # type: ignore[no-untyped-call]
    return wide(z) if rows is None else undo_mean(wide(z), rows)


@functools.cache
def intercept_backward() -> None:
    """From here on every backward that Python starts goes through this module. Idempotent."""
    original = torch.autograd.graph._engine_run_backward

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _engine_run_backward(t_outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        me = threading.get_ident()
        before, _under_way[me] = _under_way.get(me), list(t_outputs)
        try:
            with _means_undone(t_outputs, *args, **kwargs):
                return original(t_outputs, *args, **kwargs)
        finally:
            if before is None:
                del _under_way[me]
            else:
                _under_way[me] = before

    torch.autograd.graph._engine_run_backward = torch.autograd._engine_run_backward = _engine_run_backward  # type: ignore[attr-defined]


def losses_under_way() -> list[Any]:
    """What the backward under way began with: this thread's, or on a GPU, whose threads are torch's, all others'."""
    mine = _under_way.get(threading.get_ident())
    return mine if mine is not None else [loss for losses in list(_under_way.values()) for loss in losses]


@contextmanager
def _means_undone(
    t_outputs: Sequence[Any],
    gradients: Any,
    retain_graph: bool,
    create_graph: bool,
    inputs: Any = (),
    *unused: Any,
    accumulate_grad: bool = False,
    **others: Any,
) -> Iterator[None]:
    """Inside, a backward from these losses gives the outputs of private models the gradients of sums."""
    plan = None
    if _alive and accumulate_grad and not create_graph and not inputs:
        plan = _plan([loss.grad_fn for loss in t_outputs if isinstance(loss, Tensor)])
    if plan is None:
        yield
        return
    means, outputs = plan
    handles = [node.register_hook(_replaced(rule)) for node, rule in means.items()]
    for output in outputs:
        output.undone = True
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for output in outputs:
            output.undone = False


def _replaced(rule: _Rule) -> Callable[[Any, Any], Any]:
    def hook(gradients: Any, given: Any) -> Any:
        return None if given[0] is None else (rule(given[0]), *gradients[1:])

    return hook


def _plan(roots: list[Node]) -> tuple[dict[Node, _Rule], set[Node]] | None:
    """Nodes that divide by the rows, one on every way from a loss to a private output, and those outputs; None if there are
    none. Multiplied there or elsewhere on the way, the numbers are the same but for their rounding."""
    outputs = {node for node in walk(roots, _is_output) if _is_output(node)}
    sizes = {output.rows for output in outputs}
    if len(sizes) != 1:
        return None
    (rows,) = sizes
    for kinds in (_mean, _fused), (_mean, _fused, _divided), (_mean, _fused, _divided, _multiplied):
        means: dict[Node, _Rule] = {}

        def divides(node: Node, kinds: Any = kinds, means: dict[Node, _Rule] = means) -> bool:
            rule = next((rule for kind in kinds if (rule := kind(node, rows)) is not None), None)
            if rule is not None:
                means[node] = rule
            return rule is not None or _is_output(node)

        if any(_is_output(node) for node in walk(roots, divides)):
            continue  # on a way without a mean
        after = walk([following for node in means for following, _ in node.next_functions], _is_output)
        # A second mean on one way, or a parameter of the caller's, whose gradient must stay that of the mean.
        if not any(node in means or node.name().endswith("AccumulateGrad") for node in after):
            return means, outputs
    return None


def _is_output(node: Node) -> bool:
    return isinstance(node, UndoneMean._backward_cls)


def walk(nodes: Sequence[Node], ends: Callable[[Node], bool] = lambda node: False) -> set[Node]:
    """The nodes of a graph from these down to where it ``ends``, these included."""
    seen: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if not ends(node):
            pending += [following for following, _ in node.next_functions]
    return seen


# ---- nodes that divide by the rows


def _mean(node: Node, rows: int) -> _Rule | None:
    kind = node.name()
    if kind not in ("MeanBackward0", "MeanBackward1"):
        return None
    shape = node._saved_self_sym_sizes
    every = range(len(shape))
    dims = set(every) if kind == "MeanBackward0" else {_signed(d) % len(shape) for d in node._saved_dim} or set(every)
    share = _times(torch.Size(shape[d] for d in dims).numel(), rows)
    if share is None or 0 not in dims:  # a mean over an example's own positions
        return None
    kept = [1 if d in dims else n for d, n in enumerate(shape)]
    return lambda g: (g.reshape(kept) / share).expand(shape)


def _fused(node: Node, rows: int) -> _Rule | None:
    """A loss of torch's that takes the mean itself."""
    kind = node.name().removesuffix("Backward0")
    if kind not in (*_ELEMENTWISE, *_OF_CLASSES) or node._saved_reduction != MEAN:
        return None
    if any(following is not None for following, _ in node.next_functions[1:]):
        return None  # targets that want a gradient, too
    try:
        x, target = node._saved_self, node._saved_target
        if kind in _OF_CLASSES and node._saved_weight is not None:
            return None
    except RuntimeError:  # freed by an earlier backward, which torch is about to say
        return None
    share = _times(target.numel(), rows)
    if share is None or (kind in _ELEMENTWISE and x.shape != target.shape):
        return None
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower().replace("2_d", "2d")
    backward = getattr(torch.ops.aten, f"{name}_backward", None)

    def rule(g: Tensor) -> Tensor:
        with without_autocast(x.device.type):
            if backward is not None:
                slope: Tensor = backward(*_arguments(node, backward, x, g / share))
                return slope
            with torch.enable_grad():  # of sigmoids, whose gradient is no operator of its own
                leaf = x.detach().requires_grad_()
                loss = getattr(torch.ops.aten, name)
                total = loss(*_arguments(node, loss, leaf))
            return torch.autograd.grad(total, leaf, g / share)[0]

    return rule


def _arguments(node: Node, operator: Any, x: Tensor, g: Tensor | None = None) -> list[Any]:
    """Those of a summed loss, or of its gradient: what the node has saved."""
    given = {"self": x, "grad_output": g, "reduction": _SUM}
    names = [argument.name for argument in operator.default._schema.arguments]
    return [given[name] if name in given else _saved(node, name) for name in names]


def _saved(node: Node, name: str) -> Any:
    value = getattr(node, f"_saved_{name}")
    return _signed(value) if name == "ignore_index" else value


def _signed(number: int) -> int:
    """What torch shows of a negative number in a node."""
    return number - 2**64 if number >= 2**63 else number


def _divided(node: Node, rows: int) -> _Rule | None:
    by = _number(node) if node.name() in ("DivBackward0", "DivBackward1") else None
    share = None if by is None else _times(by, rows)
    return None if share is None else lambda g: g / share


def _multiplied(node: Node, rows: int) -> _Rule | None:
    by = _number(node) if node.name() in ("MulBackward0", "MulBackward1") else None
    count = round(1 / by) if by else 0
    share = _times(count, rows) if by and abs(by * count - 1) <= 2**-23 else None
    return None if share is None else lambda g: g / share


def _number(node: Node) -> float | None:
    """The number that a node multiplies or divides its first argument by; None if it is not known without waiting."""
    if node.next_functions[0][0] is None or any(following is not None for following, _ in node.next_functions[1:]):
        return None
    try:
        other = node._saved_other
    except RuntimeError:
        return None
    if isinstance(other, Tensor) and (other.dim() or other.device.type != "cpu"):
        return None
    with _disable_current_modes():  # in which a number that was made a tensor is none again
        return float(other)


def _times(count: float, rows: int) -> int | None:
    """How many times the rows a number is; None if it is not."""
    return int(count // rows) if count >= rows and count % rows == 0 else None


class Seed(torch.autograd.Function):
    """The first layer's output, made to ask for a gradient although nothing before it does. No copy."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, seed: Tensor) -> Tensor:
        if z._is_view() or z.stride().count(0):
            return z.clone()
        ctx.mark_dirty(z)
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None]:
        return None, None


@torch.library.custom_op("dpivon::stored", mutates_args=(), schema="(Tensor t) -> Tensor")
def stored(t: Tensor) -> Tensor:
    """The same numbers, in memory. What no product reads a compiler may compute anew for everyone who does: rounded once more,
    what is added up would no longer be what was measured."""
    return t.clone()


@stored.register_fake
def _(t: Tensor) -> Tensor:
    return torch.empty_like(t)
