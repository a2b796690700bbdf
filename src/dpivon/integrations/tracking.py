"""A private run in TensorBoard or MLflow: ε, σ and diagnostics, which are public, and the rest under a name of its own.

Tags: ``privacy/…`` (ε, σ, C) and ``diagnostics/…`` (functions of released gradients and the posterior) may be shown to
anybody. ``NOT_PRIVATE/…`` is what the caller logs of private data, such as a training loss: ε does not cover it.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

from dpivon.diagnostics import Diagnostics, Row
from dpivon.errors import PrivacyWarning, bad, check_number, check_whole, need
from dpivon.privacy import DPOptimizer, PrivacyEngine

NOT_PRIVATE = "NOT_PRIVATE"


class Sink(Protocol):
    """Where numbers go."""

    def scalars(self, values: Mapping[str, float], step: int) -> None: ...

    def settings(self, values: Mapping[str, str]) -> None: ...

    def close(self) -> None: ...


class PrivateLog:
    """Watches a private optimizer. Call ``observe()`` after every ``step()``.

    Args:
        optimizer: what ``make_private`` returned.
        engine: whose account to read.
        delta: δ of the ε that is written.
        sink: where the numbers go.
        every: write each n-th release; diagnostics look at all parameters, so n = 1 costs time.
    """

    def __init__(self, optimizer: Any, engine: PrivacyEngine, sink: Sink, *, delta: float, every: int = 10) -> None:
        if not isinstance(optimizer, DPOptimizer):
            fix = "Pass the optimizer that make_private returned"
            raise bad("optimizer", type(optimizer).__name__, "is not private", fix)
        self.optimizer, self.engine, self.sink = optimizer, engine, sink
        self.delta = check_number("delta", delta, "Use a probability well below 1/N", above=0.0, below=1.0)
        self.every = check_whole("every", every, "Use 1 for all", at_least=1)
        self.diagnostics, self.releases = Diagnostics(optimizer), 0
        self._seen: Any = None
        self._warned, spec = False, optimizer.spec
        self.sink.settings(
            {
                "delta": repr(self.delta),
                "expected_batch_size": repr(spec.expected_batch_size),
                "sample_rate": repr(spec.sample_rate),
                "accountant": engine.accountant.mechanism(),
                "note": f"privacy/ and diagnostics/ are public; {NOT_PRIVATE}/ is not covered by epsilon",
            }
        )

    def observe(self) -> Row | None:
        """Write the release that was just made, if it is its turn. A step that only accumulated writes nothing."""
        release = self.optimizer.last_release
        if release is None or release is self._seen:
            return None
        self._seen = release
        self.releases += 1
        if self.releases % self.every and self.releases > 1:
            return None
        row = self.diagnostics.observe(step=self.releases)
        spec = self.optimizer.spec
        public = {"noise_multiplier": spec.noise_multiplier, "max_grad_norm": spec.max_grad_norm}
        self._write("privacy", {"epsilon": self._epsilon()} | public)
        # Without noise a row describes raw gradients.
        self._write("diagnostics" if row.private else NOT_PRIVATE, _numbers(row))
        return row

    def not_private(self, name: str, value: float) -> None:
        """Write a number that was computed from private examples, under a tag that says so."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{NOT_PRIVATE}/{name}: is computed from private data without noise, so ε does not cover whoever sees this "
                "log. Keep the log as secret as the data.",
                PrivacyWarning,
                stacklevel=2,
            )
        self._write(NOT_PRIVATE, {name: float(value)})

    def public(self, name: str, value: float) -> None:
        """Write a number of your own that reads no private data, such as an accuracy on public test data."""
        self._write("public", {name: float(value)})

    def _epsilon(self) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)  # it was warned of when the run was made
            return self.engine.get_epsilon(self.delta)

    def _write(self, group: str, values: Mapping[str, float]) -> None:
        known = {f"{group}/{name}": value for name, value in values.items() if not math.isnan(value)}
        self.sink.scalars(known, self.releases)

    def close(self) -> None:
        self.sink.close()

    def __enter__(self) -> PrivateLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _numbers(row: Row) -> dict[str, float]:
    values = {name: getattr(row, name) for name in ("gradient_rms", "noise_std", "projected_share", "noise_to_signal")}
    for name in ("hess", "std"):
        values |= {f"{name}_{key}": number for key, number in asdict(getattr(row, name)).items()}
    return values


class TensorBoardSink:
    """Event files in a folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        need("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(os.fspath(folder))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def settings(self, values: Mapping[str, str]) -> None:
        self._writer.add_text("privacy/settings", "\n\n".join(f"{name} = {value}" for name, value in values.items()))

    def close(self) -> None:
        self._writer.close()


class MLflowSink:
    """The active MLflow run, or a new one, which ``close`` ends."""

    def __init__(self) -> None:
        self._mlflow = need("mlflow", "mlflow")
        self._own = self._mlflow.active_run() is None
        if self._own:
            self._mlflow.start_run()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def settings(self, values: Mapping[str, str]) -> None:
        self._mlflow.log_params({f"privacy/{name}": value for name, value in values.items()})

    def close(self) -> None:
        if self._own and self._mlflow.active_run() is not None:
            self._mlflow.end_run()


def tensorboard_log(
    optimizer: DPOptimizer, engine: PrivacyEngine, folder: str | os.PathLike[str], *, delta: float, every: int = 10
) -> PrivateLog:
    """A :class:`PrivateLog` that writes event files for TensorBoard into ``folder``."""
    return PrivateLog(optimizer, engine, TensorBoardSink(folder), delta=delta, every=every)


def mlflow_log(optimizer: DPOptimizer, engine: PrivacyEngine, *, delta: float, every: int = 10) -> PrivateLog:
    """A :class:`PrivateLog` into the active MLflow run, or a new one."""
    return PrivateLog(optimizer, engine, MLflowSink(), delta=delta, every=every)


__all__ = ["NOT_PRIVATE", "MLflowSink", "PrivateLog", "Sink", "TensorBoardSink", "mlflow_log", "tensorboard_log"]
