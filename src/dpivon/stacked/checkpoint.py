"""Stacks on disk: a run that is killed goes on where it was, and is never charged less for it.

The ledger is written before the releases it charges; the checkpoints hold the rows' states and where the streams are.
Batches, noise and samples are functions of seed and place in the stream, so on a CPU a stack that stopped in good order
goes on as if it had not. What the ledger has and the checkpoint has not was made, or may have been, and lost: it stays
charged. On a CPU it is repeated, to the bit or not at all.

Two copies of a folder have the same seeds and places, and the same noise must not meet two different sums. So where sums may
come out otherwise, on a GPU or by another program, a stack goes on with new seeds from the operating system.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import platform
import secrets
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dpivon.durable.checkpoint import Rotation
from dpivon.durable.ledger import Ledger
from dpivon.durable.tensors import bytes_of
from dpivon.errors import PrivacyError, PrivacyWarning, bad
from dpivon.privacy.accounting.recorded import LEDGER
from dpivon.privacy.temperature import temperature_releases
from dpivon.stacked.run import estimator_of
from dpivon.stacked.stack import Stack


class StackCheckpoints:
    """A stack's folder. ``names`` are the runs' ids, in the order they were given to the stack: the ledger has them.

    >>> kept = StackCheckpoints(stack, folder)
    >>> extra = kept.restore()
    >>> for done in stack.train(1000): ...
    >>> kept.save({"seconds": 12.5})
    >>> kept.settle()  # when it stops here in good order
    """

    def __init__(self, stack: Stack, folder: Path, names: Sequence[str] | None = None) -> None:
        self.stack, self.folder = stack, folder
        given = [f"run {i}" for i in range(len(stack.runs))] if names is None else list(names)
        if len(set(given)) != len(stack.runs):
            raise bad("names", given, f"are not {len(stack.runs)} different names", "Give one per run of the stack")
        stack.mechanism.names = tuple(given[i] for i in stack.order)  # a stack sorts its runs
        self.ledger, self._files = Ledger(folder / LEDGER), Rotation(folder)
        self._data_digest: tuple[bytes, str] | None = None

    def close(self) -> None:
        self.ledger.close()

    def save(self, extra: Mapping[str, Any]) -> Path:
        """Write a checkpoint, whole or not at all. ``extra`` is anything JSON can hold."""
        stack, at = self.stack, int(self.stack._at)
        state = {
            "step": int(stack._t),
            "at": at,
            "runs": _fingerprint(stack),
            "estimators": _estimators(stack),
            "data": self._digest(stack.mechanism.key),
            "ledger": self.ledger.record.id,
            "charged": min(
                self.ledger.record.releases, stack.mechanism.charged
            ),  # what is written ahead may be given back
            "key": torch.frombuffer(bytearray(stack.mechanism.key), dtype=torch.uint8),
            "rows": [dict(part.state) for part in stack.parts],
            "hyper": _hyper(stack),
            "program": _program(stack),
            "drawn_by": stack.streams.origin,
            "extra": dict(extra),
            **({"memory": stack.mechanism.memory} if stack.mechanism.memory else {}),
        }
        return self._files.write(at, state)

    def settle(self) -> None:
        """Nothing is under way: what was written ahead and not launched is given back."""
        self.ledger.give_back(max(0, self.ledger.record.releases - self.stack.mechanism.charged))

    def restore(self) -> dict[str, Any]:
        """Put a fresh stack where its last checkpoint was and return ``extra``; without one it begins, with a checkpoint."""
        stack, record = self.stack, self.ledger.record
        state = self._files.read()
        if state is not None:
            self._check(state)
        if record.names not in ((), stack.mechanism.names):
            raise PrivacyError(
                f"{self.ledger.path}: is of other runs, or of these in another order. Give each stack its own folder."
            )
        stack.mechanism.attach(self.ledger, secrets.token_bytes(32))
        if state is None:
            stack._at.fill_(record.releases)
            if record.releases:
                stack.streams.refresh()
            self._tell_lost(record.releases)
            self.save({})
            return {}
        with torch.no_grad():
            for part, saved in zip(stack.parts, state["rows"], strict=True):
                for name, value in part.state.items():
                    value.copy_(saved[name])
        # What noise remembers counts as long as its seeds do.
        stack.mechanism.memory = {name: value.to(stack.device) for name, value in state.get("memory", {}).items()}
        stack.mechanism.remembered = list(stack.streams.seeds)
        stack._t.fill_(state["step"])
        stack.steps_done = state["step"]
        stack.mechanism.key = bytes(state["key"].tolist())
        lost = (
            record.releases - state["at"] - temperature_releases(record, since=state["at"])
        )  # who chose them knows more
        # New seeds are nowhere on disk, and the given ones may have served a copy at the places that come next.
        again = state.get("drawn_by") == stack.streams.origin and state.get("program") == _program(stack)
        again = again and stack.mechanism.one_by_one
        if again and state["at"] in record.evidence:
            stack._at.fill_(state["at"])
            stack.mechanism.covered = lost
        else:
            stack._at.fill_(record.releases)
            if lost or not again:
                stack.streams.refresh()
            self._tell_lost(lost)
        return dict(state["extra"])

    def _tell_lost(self, lost: int) -> None:
        if lost:
            warnings.warn(
                f"{self.folder}: {lost} releases were made, or reserved, and lost. They stay charged; noise and "
                "batches are new.",
                PrivacyWarning,
                stacklevel=3,
            )

    def _check(self, state: Mapping[str, Any]) -> None:
        fix = f"Delete {self.folder} to begin its runs again, and count what the ledger in it says was released"
        if state["ledger"] != self.ledger.record.id or self.ledger.record.releases < state["charged"]:
            raise PrivacyError(
                f"{self.ledger.path}: is missing, cut short, or another stack's, so what was charged since the "
                f"checkpoint is unknown. Put it back. {fix}."
            )
        if state["runs"] != _fingerprint(self.stack) or state["data"] != self._digest(bytes(state["key"].tolist())):
            raise bad("checkpoint", str(self.folder), "is of other runs, another network or other data", fix)
        self._check_estimators(state, fix)
        for before, now in zip(state.get("hyper", []), _hyper(self.stack), strict=False):
            for name in [name for name in now if name in before]:  # what was not written down is not compared
                if not torch.allclose(now[name], before[name], rtol=1e-5, atol=0.0):
                    begun = f"but runs in {self.folder} were begun with {before[name].tolist()}"
                    raise bad(name, now[name].tolist(), begun, f"Go on with that. {fix}")

    def _check_estimators(self, state: Mapping[str, Any], fix: str) -> None:
        """A run that names no estimator has its method's, and that may be another one than when it was begun."""
        ours = _estimators(self.stack)
        begun = state.get("estimators", ours)  # from before it was written down: what the rows remember must do
        alike = all(set(part.state) == set(saved) for part, saved in zip(self.stack.parts, state["rows"], strict=True))
        if begun != ours or not alike:
            known = f"with {begun!r}" if begun != ours else "with another default, which remembers something else"
            problem = f"but runs in {self.folder} were begun {known}"
            raise bad("curvature", ours, problem, f"Go on with the version of dpivon that began them. {fix}")

    def _digest(self, key: bytes) -> str:
        """Of the data, keyed; once, since it may be large."""
        if self._data_digest is None or self._data_digest[0] != key:
            total = hmac.new(key, digestmod=hashlib.sha256)
            for value in (self.stack.inputs, self.stack.labels):
                total.update(f"{value.dtype} {list(value.shape)}".encode())
                total.update(bytes_of(value))
            self._data_digest = key, total.hexdigest()
        return self._data_digest[1]


def _hyper(stack: Stack) -> list[dict[str, torch.Tensor]]:
    """The numbers that rows are updated with. Some follow from what no run says: the plan's steps, N, the first weights."""
    # The noise's variance follows from the specs, which are in the fingerprint.
    return [{k: v.flatten().cpu() for k, v in p.hyper.items() if k != "noise_variance"} for p in stack.parts]


def _program(stack: Stack) -> str:
    """What computes the sums, as far as it can be known: libraries, layers, and the code of loss and forward passes."""
    model = stack.network.model(stack.mean[0])
    own: list[Any] = [getattr(stack.network, "given_loss", None), *(type(m).forward for m in model.modules())]
    codes = {(f.__qualname__, f.__code__.co_code, f.__code__.co_names) for f in own if hasattr(f, "__code__")}
    kinds = [type(part).__qualname__ for part in (stack.network, stack.gradients, own[0])]
    text = repr((torch.__version__, platform.machine(), kinds, repr(model), sorted(codes)))
    return hashlib.sha256(text.encode()).hexdigest()


def _estimators(stack: Stack) -> list[str]:
    """The curvature estimator of every run; empty where there is none."""
    own = {run.method: estimator_of(run.method) for run in stack.runs}
    return [run.kind.curvature or getattr(own[run.method], "name", "") for run in stack.runs]


def _fingerprint(stack: Stack) -> str:
    """Which stack this is, without its seeds, which are as secret as the noise."""
    shape = {k: list(v.shape) for p in stack.parts for k, v in p.state.items()}
    rates = [s.digest for s in stack.mechanism.specs]
    views = [] if stack.augment is None else [repr(stack.augment)]  # left out: stacks from before there were any go on
    text = json.dumps([[repr(run) for run in stack.runs], rates, shape, len(stack.inputs), *views])
    return hashlib.sha256(text.encode()).hexdigest()
