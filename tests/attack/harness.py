"""The verdict on a case and a path: right, refused in a clear sentence, or a failure."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from attack_case import Case, mapped, tensors
from runners import RUNNERS, Seen, Theta, flat
from torch import Tensor

from dpivon.errors import DpivonError, RankError

SLACK = 1e-5  # of C
ALIKE = "all rows alike"
SEVERITY = ("right", "wrong", "silent")
GOOD = ("right", "refused", "torch refuses", "—")


@dataclass(frozen=True)
class Verdict:
    """What came of a case on a path.

    ``kind`` is "right", "refused", "torch refuses" (the program does not run without us either), "—" (cannot be tried), or a
    failure: "silent" (an example moves the sum by more than C, or what the model keeps), "wrong" (private, but not the clipped
    sum), "crash" (an error that is not ours), "unclear" (a refusal without a name or a remedy), "late" (a refusal that depends
    on the data, and so tells of it), "rank error" (another rank is gone).
    """

    kind: str
    text: str = ""
    factor: float = 0.0  # how far one example moved the sum, in C

    def __str__(self) -> str:
        moved = f" ({self.factor:.6g} C)" if self.kind in ("silent", "wrong") else ""
        return self.kind + moved + (f": {self.text}" if self.text else "")

    @property
    def good(self) -> bool:
        return self.kind in GOOD


def judge(case: Case, path: str, *, quick: bool = False) -> Verdict:
    """Train on D and on D∖{x} for several x, inputs and C; hold the sums to each other and to the fp64 loop.

    ``quick`` tries a quarter of it.
    """
    if path not in case.paths or (path in ("fit", "stacked") and case.each is None):
        return Verdict("—")
    if path == "stacked" and case.tolerance is None:  # its runs draw different numbers, so there is nothing to compare
        return Verdict("—")
    worst, completed = Verdict("right"), 0
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            for found in _tried(case, path, quick):
                worst, completed = max(worst, found, key=severity), completed + 1
        except RankError as error:
            return Verdict("rank error", str(error))
        except DpivonError as error:
            if worst.kind == "silent":
                return worst
            kind = "refused" if is_clear(case, str(error)) else "unclear"
            return Verdict("late" if completed else kind, str(error))
        except Exception as error:
            if worst.kind == "silent":
                return worst
            said = f"{type(error).__name__}: {error}".split("\n")[0][:300]
            return Verdict("crash" if _runs_alone(case, path) else "torch refuses", said)
    return worst


def severity(v: Verdict) -> tuple[int, float]:
    return SEVERITY.index(v.kind), v.factor


def _tried(case: Case, path: str, quick: bool) -> Iterator[Verdict]:
    batch = case.build()[1]
    size = next(tensors(batch[1])).shape[0]
    run, quick = RUNNERS[path], quick or path == "stacked"  # where every C is a program to trace
    for kind, changed in list(variants(case, batch))[-2 if quick else 0 :]:
        gradients = reference(case, changed, path)
        norms = None if gradients is None else gradients.norm(dim=1)
        for bound in case.bounds or _bounds(norms, kind, quick):
            few = quick or path == "ddp" or kind == ALIKE
            without = [[i for i in range(size) if i != x] for x in case.removed or _removed(norms, size, few)]
            whole, *others = run(case, changed, [range(size), *without], bound)
            allowed = bound * math.sqrt(_tensors_clipped_apart(case))
            for other in others:
                yield _compared(case, whole, other, allowed)
            if case.tolerance is not None:
                yield _held_to(case, changed, path, whole, gradients, bound)


def _compared(case: Case, whole: Seen, without: Seen, bound: float) -> Verdict:
    if not whole.sums or len(whole.sums) != len(without.sums):
        return Verdict("wrong", f"{len(whole.sums)} and {len(without.sums)} releases", math.inf)
    pairs = list(zip(whole.sums, without.sums, strict=True))
    if case.tolerance is None:  # later steps of a random forward draw something else in each world
        pairs = pairs[:1]
    moved = max(float((a - b).norm()) / bound for a, b in pairs)
    if not moved <= 1 + SLACK:
        return Verdict("silent", "", moved)
    for name in whole.state.keys() | without.state.keys():
        if not _same(whole.state.get(name), without.state.get(name)):
            return Verdict("silent", f"{name} is left different", moved)
    return Verdict("right", "", moved)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        wide = torch.complex128 if a.is_complex() else torch.float64
        # fit and stacks have a learning rate of 1e-30, which moves what is zero
        return a.shape == b.shape and torch.allclose(a.to(wide), b.to(wide), rtol=0, atol=1e-20, equal_nan=True)
    return type(a) is type(b) and (a == b or a != a)


def _held_to(case: Case, batch: Any, path: str, seen: Seen, gradients: Tensor | None, bound: float) -> Verdict:
    if gradients is None:
        return Verdict("wrong", "the per-example loop does not run", math.inf)
    if seen.thetas:
        draws = seen.thetas[: len(seen.thetas) // len(seen.sums)]
        at = [reference(case, batch, path, theta) for theta in draws]
        gradients = sum(g for g in at if g is not None) / len(at)  # type: ignore[assignment]
    clipped = clip(case, gradients, bound)
    if seen.sums[0].shape != clipped[0].shape:
        return Verdict("wrong", f"{len(seen.sums[0])} numbers are released of {clipped.shape[1]}", math.inf)
    added = float(clipped.norm(dim=1).sum())
    off = float((seen.sums[0] - clipped.sum(0)).norm())
    if off <= case.tolerance * added + 1e-6 * bound:
        return Verdict("right")
    return Verdict("wrong", "is not the sum of clipped gradients", off / bound)


# ---- the definition, in double


def reference(case: Case, batch: Any, path: str, theta: Theta | None = None) -> Tensor | None:
    """∇ℓ_i, [B, P], one example at a time in double; not-finite ones count for zero. None where that does not run."""
    model, _, loss = case.build()
    double = lambda t: t.to(torch.complex128 if t.is_complex() else torch.float64)  # noqa: E731
    try:
        model.double()
        for name, q in model.named_parameters():
            if q.is_complex():  # which .double() leaves alone
                q.data = double(q.data)
            if theta is not None:
                q.data.copy_(theta[name])
        wide = mapped(lambda t: double(t) if t.is_floating_point() or t.is_complex() else t, batch)
        params = [q for q in model.parameters() if q.requires_grad]
        rows = []
        for i in range(next(tensors(batch[1])).shape[0]):
            x = mapped(lambda t, i=i: t.narrow(case.batch_dim, i, 1), wide[0])
            y = mapped(lambda t, i=i: t.narrow(0, i, 1), wide[1])
            if path in ("fit", "stacked"):
                value = case.each(model(x), y).sum()  # type: ignore[misc]
            else:
                value = loss(model, (x, y)) if case.whole else loss(model(x), y)
            model.zero_grad()
            value.backward()  # not autograd.grad, which a reentrant checkpoint does not know
            rows.append(flat([torch.zeros_like(q) if q.grad is None else q.grad for q in params]))
    except Exception:
        return None
    rows = torch.stack(rows)
    return torch.where(rows.isfinite().all(1, keepdim=True), rows, 0.0)


def clip(case: Case, gradients: Tensor, bound: float) -> Tensor:
    parts = [gradients]
    if _tensors_clipped_apart(case) > 1:
        sizes = [q.numel() for q in case.build()[0].parameters() if q.requires_grad]
        parts = list(gradients.split(sizes, 1))
    return torch.cat([g * (bound / g.norm(dim=1, keepdim=True).clamp(min=1e-300)).clamp(max=1.0) for g in parts], 1)


def _tensors_clipped_apart(case: Case) -> int:
    if case.options.get("clipping") != "per_layer":
        return 1
    return sum(q.requires_grad for q in case.build()[0].parameters())


# ---- what is tried


def variants(case: Case, batch: Any) -> Iterator[tuple[str, Any]]:
    """The batch as it is, every other row scaled by 30, and all rows alike."""
    inputs, targets = batch
    yield "ordinary", batch

    def grown(t: Tensor) -> Tensor:
        if not (t.is_floating_point() or t.is_complex()):
            return t
        factor = torch.ones(t.shape[case.batch_dim])
        factor[::2] = 30.0
        return t * factor.view([-1 if d == case.batch_dim else 1 for d in range(t.dim())]).to(t.dtype)

    if any(t.is_floating_point() or t.is_complex() for t in tensors(inputs)):
        yield "every other row × 30", (mapped(grown, inputs), targets)

    def alike(dim: int) -> Any:
        return lambda t: t.narrow(dim, 1, 1).expand_as(t).clone()

    yield ALIKE, (mapped(alike(case.batch_dim), inputs), mapped(alike(0), targets))


def _bounds(norms: Tensor | None, kind: str, quick: bool) -> tuple[float, ...]:
    """One that clips nobody and one that clips everybody; and where a loss that is scaled by the batch would show most."""
    if norms is None or not float(norms.max()) > 0:
        return 1.0, 0.01
    if kind == ALIKE:
        return tuple(factor * float(norms.max()) for factor in ((1.001, 10.0) if quick else (0.1, 1.001, 1.3, 10.0)))
    # A gradient far below the largest is rounding error in fp32, and clipping it shows that error in full.
    return 1.001 * float(norms.max()), 0.1 * float(norms[norms > 1e-3 * norms.max()].min())


def _removed(norms: Tensor | None, size: int, few: bool) -> Sequence[int]:
    largest = size // 2 if norms is None else int(norms.argmax())
    return [largest] if few else sorted({0, size - 1, largest})


# ---- refusals


_REMEDY = re.compile(
    r"(^|[.:;,)] |\b(or|and|Please) )(use|give|call|keep|pass|freeze|set|remove|replace|train|run|add|compute|take|write|leave|"
    r"make|put|detach|declare|check|move|let|wrap|return|turn|apply|load|divide|start|register|store|honour|go|choose)\b"
    r"|get_compatible_module",
    re.IGNORECASE,
)


def is_clear(case: Case, sentence: str) -> bool:
    """One line of bearable length that names what is wrong and says what to do."""
    return "\n" not in sentence and len(sentence) <= 600 and _names(case, sentence) and bool(_REMEDY.search(sentence))


def _names(case: Case, sentence: str) -> bool:
    """Whether it names an argument (``name=``), a part of the model or its class, or what the loop does."""
    if re.search(r"\b[\w.]+=|\bloss\b|\bbackward\b|\bstep\(\)", sentence):
        return True
    model = case.build()[0]
    parts = [*dict(model.named_modules()), *dict(model.named_parameters()), *dict(model.named_buffers()), *vars(model)]
    classes = "|".join({type(layer).__name__ for layer in model.modules()})
    return bool(re.search(rf"\b({classes})\b", sentence)) or any(
        re.search(rf"['\"`.]{re.escape(name)}\b", sentence) for name in parts if name
    )


def _runs_alone(case: Case, path: str) -> bool:
    """Whether the program trains in plain torch."""
    model, batch, loss = case.build()
    try:
        if path in ("fit", "stacked"):
            case.each(model(batch[0]), batch[1]).mean().backward()  # type: ignore[misc]
        else:
            (loss(model, batch) if case.whole else loss(model(batch[0]), batch[1])).backward()
    except Exception:
        return False
    return True
