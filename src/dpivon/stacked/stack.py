"""K private runs trained as one program.

Runs may differ in method, seed, σ, C, learning rate and batch size. Each has its own Poisson batches, noise and
posterior samples, drawn from its own seed, so a run in a stack is the same run alone, to rounding; and each has its
own account.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.errors import PrivacyError, PrivacyWarning, bad, check_whole
from dpivon.methods import METHODS
from dpivon.optim.average import window_decay
from dpivon.optim.ivon_rule import variance
from dpivon.optim.prior import as_prior, damping, prior_state
from dpivon.optim.rule import takes_prior
from dpivon.optim.steady import weight_scale
from dpivon.posterior import Posterior
from dpivon.privacy.accounting import DEFAULT
from dpivon.privacy.augmentation import Augmentation, used
from dpivon.privacy.clipping import Clipping, make_clipping
from dpivon.privacy.kernels.reference import Batch
from dpivon.privacy.kernels.replay import Replay
from dpivon.privacy.mechanism import Mechanism, NoiseSpec, check_mechanism
from dpivon.privacy.precision import compiled, without_autocast
from dpivon.privacy.stack import BatchBlock, StackedMechanism, StackedSampler
from dpivon.privacy.streams import POSTERIOR, VIEWS, Streams
from dpivon.stacked.networks import AnyNetwork, Network
from dpivon.stacked.run import FILLED, Kind, Rows, Run, State, defaults_of, rule_of


class Stack:
    """Trains runs on labelled data that stays on the device, where a GPU runs whole steps without Python.

    >>> stack = Stack(runs, PaperNetwork(), images, labels)      # [N, 3, 32, 32], normalised by public constants
    >>> for done in stack.train(steps=1000): ...
    >>> stack.epsilon(0, delta=1e-5), stack.posterior(0)

    Args:
        runs: what to train; no seed twice.
        network: :class:`~dpivon.stacked.PaperNetwork`, or :class:`~dpivon.stacked.AnyNetwork` around a function that builds
            a model.
        inputs: one example per row, normalised by public constants.
        labels: one per example.
        start: the runs' first parameters, [K, P]; without it each run's seed initialises them.
        dataset_size: the public N, if it is not simply ``len(inputs)``.
        dtype: of forward and backward; norms and sums are wider.
        block: how many steps are drawn and charged at once.
        steps: how many steps are planned, if that is known: a step size may depend on it.
        augment: augmentations of every drawn image, over which its gradient is averaged before it is clipped.
        clipping: the rule that bounds every example at its run's C, by its name or as an object.
        mechanism: how the noise of all runs is drawn and charged.
        accountant: what computes :meth:`epsilon`.
        prior: of the weights of all runs, as for :class:`dpivon.IVON`, under the names of the network's parameters.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        network: Network,
        inputs: Tensor,
        labels: Tensor,
        *,
        start: Tensor | None = None,
        dataset_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        block: int = 32,
        steps: int = 0,
        augment: Augmentation | None = None,
        clipping: str | Clipping = "flat",
        mechanism: str | Mechanism = "gaussian",
        accountant: str = DEFAULT,
        prior: Posterior | str | os.PathLike[str] | None = None,
    ) -> None:
        if not runs:
            raise bad("runs", [], "there is nothing to train", "Give at least one Run")
        if len(inputs) != len(labels):
            raise bad("labels", len(labels), f"does not match {len(inputs)} inputs", "Give one label per input")
        _check_seeds(runs, start)
        block = check_whole("block", block, "Use the number of steps to draw and charge at once", at_least=1)
        if block > 100_000:
            raise bad("block", block, "would draw more batches at once than fit", "Use about 32")
        n = len(inputs) if dataset_size is None else dataset_size
        check_whole("dataset_size", n, "Use the number of examples that q = batch_size/N refers to", at_least=1)
        if isinstance(network, AnyNetwork):
            network.check(inputs, labels, max(2, int(max(r.batch_size for r in runs))))
        self.augment = used(augment)
        if self.augment is not None:
            self.augment.check(inputs)
        # Rows of one method stand together, so that each rule acts on a slice.
        self.order = sorted(range(len(runs)), key=lambda i: (list(METHODS).index(runs[i].method), runs[i].kind))
        self.runs = [runs[i] for i in self.order]
        self.network, self.block = network, block
        self.steps = check_whole("steps", steps, "Use the planned number of steps, or 0 where it is not known")
        self.device = inputs.device
        tensors = len(network.matrices)
        bounds: Any = [1.0] * tensors if clipping == "per_layer" else 1.0
        rule = make_clipping(clipping, bounds, tensors)
        same: dict[str, Any] = {"mechanism": check_mechanism(mechanism), "clipping": rule.name}
        specs = [
            NoiseSpec(r.noise_multiplier, r.max_grad_norm, r.batch_size, r.batch_size / n, **same) for r in self.runs
        ]
        self.streams = Streams([r.seed for r in self.runs], self.device)
        self.mechanism = StackedMechanism(specs, self.streams, self.device, accountant)
        self.sampler = StackedSampler(specs, len(inputs), self.streams, self.device)
        views: dict[str, Any] = {} if self.augment is None else {"augment": self.augment}
        views |= {} if rule.name == "flat" else {"clipping": rule}
        self.gradients = network.gradients(len(runs), self.sampler.capacity, self.device, dtype, **views)
        self.inputs, self.labels = self.gradients.prepare(inputs), labels
        self.steps_done = 0
        self._t = torch.zeros((), dtype=torch.int64, device=self.device)  # steps done, on the device
        # Where the streams are: releases ever charged, so that no place is drawn twice.
        self._at = torch.zeros_like(self._t)
        self._position = torch.zeros((), dtype=torch.int64, device=self.device)  # in the block of batches
        rows = [network.initial(runs[i].seed) if start is None else start[i] for i in self.order]
        mean = torch.stack(rows).to(self.device, torch.float32)
        self._eps = torch.zeros_like(mean)
        self._prior = None if prior is None else as_prior(prior)
        self.parts = [self._part(kind, mean, n) for kind in dict.fromkeys(r.kind for r in self.runs)]
        self._buffers: BatchBlock | None = None
        self._ahead: tuple[int, list[int], BatchBlock] | None = (
            None  # drawn before its time: from where, by which seeds
        )
        self._drawn: BatchBlock | None = None  # what the buffers hold; its memory is kept until they were filled
        self._draws_ahead = self.device.type == "cuda"
        self._beside = torch.cuda.Stream(self.device) if self._draws_ahead else None
        self._replay = Replay(self._step, self.device)
        self._given: list[Tensor] = []  # to _sums_of_part: θ, and a part of a batch
        self._replay_part = Replay(self._sums_of_part, self.device, self._replay)
        self._captured_bound: tuple[int, int] | None = None  # which C the graph clips to: it may be a constant in it
        self._sample, self._apply = compiled(self._thetas, self.device), compiled(self._update_rows, self.device)

    def _part(self, kind: Kind, mean: Tensor, n: int) -> _Part:
        method, averaged, curvature, traced = kind
        defaults = defaults_of(method)
        rows = [i for i, r in enumerate(self.runs) if r.kind == kind]
        kept = [name for name, used in {"ema": averaged, "trace": traced}.items() if used]
        keys = ["lr", *FILLED, *defaults, *kept]
        columns = []
        for i in rows:
            run = self.runs[i]
            values = defaults | self._own(run, mean[i], n) | dict(run.options)
            columns.append([float(values[key]) for key in keys])
        table = torch.tensor(columns, dtype=torch.float32, device=self.device)
        hyper = {key: table[:, j : j + 1].clone() for j, key in enumerate(keys)}
        place = slice(rows[0], rows[-1] + 1)
        hyper["noise_variance"] = self.mechanism.variance[place]
        made = Rows(rule_of(method, curvature, self.network.matrices), averaged, traced)
        state = made.start(mean[place].clone(), hyper)
        return _Part(made, place, state | self._prior_rows(method, made, hyper), hyper)

    def _prior_rows(self, method: str, rows: Rows, hyper: State) -> State:
        """μ and δ of every run of one method, [K, P] each."""
        if self._prior is None:
            return {}
        if not takes_prior(rows.rule):
            raise bad("prior", self._prior, f"is not used by {method!r}", "Use 'dp-steady', 'dp-calm' or a DP-IVON")
        first = self.network.model(torch.zeros(self.network.size))
        each = [prior_state(self._prior, n, p, 1.0) for n, p in first.named_parameters() if p.requires_grad]
        mean, weight = (torch.cat([own[key].flatten() for own in each]) for key in ("prior_mean", "prior_decay"))
        ess = hyper["ess"].double()
        return {
            "prior_mean": mean.to(self.device, torch.float32).expand(len(ess), -1).clone(),
            "prior_decay": (weight.to(self.device) / ess).float(),
        }

    def _own(self, run: Run, mean: Tensor, n: int) -> dict[str, float]:
        """What no table of defaults can know."""
        own = {"lr": run.lr, "ess": float(n), "batch_size": float(run.batch_size), "scale": 1.0}
        own["trace"] = run.trace
        if "steps" in defaults_of(run.method):
            own["steps"] = float(self.steps)
            shapes = self.network.matrices
            own["scale"] = weight_scale(mean.split([r * c for r, c in shapes]), shapes)
        return own | {"ema": window_decay(float(run.options.get("steps", self.steps)))}

    # ---- training

    def train(self, steps: int) -> Iterator[int]:
        """Make so many steps with every run, yielding how many are done after each block."""
        steps = check_whole("steps", steps, "Use the number of steps to make", at_least=0)
        while steps > 0:
            n = min(self.block, steps)
            # The device knows: a block that failed midway made some steps, and their batches must not be drawn again.
            self.steps_done = int(self._t)
            self.mechanism.reserve(n)
            with without_autocast(self.device.type):  # the caller's: sums in bf16 would be more than was measured
                self._make(n)
            self.steps_done += n
            steps -= n
            yield self.steps_done

    def _make(self, n: int) -> None:
        self._draw(n)
        assert self._buffers is not None
        for i in range(n):
            self.mechanism.spend()
            try:
                parts = self._buffers.overflows.get(i)
                self._launch() if parts is None else self._step_in_parts(parts)
            except _Another:
                warnings.warn(
                    "A resumed step is not the one that was lost, bit for bit: what was lost stays charged, and noise and "
                    "batches are new from here.",
                    PrivacyWarning,
                    stacklevel=3,
                )
                self.mechanism.reserved += 1  # it was not made
                self._at.fill_(self.mechanism.forsake(n - i))
                self.streams.refresh()  # a copy of this run may stand at the same place, with another sum
                self._make(n - i)
                return
        self._draw_ahead()

    def _draw(self, n: int) -> None:
        first, ahead = int(self._at), self._ahead
        if self._beside is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._beside)
        known = ahead is not None and ahead[:2] == (first, self.streams.seeds)
        self._drawn = fresh = ahead[2] if known and ahead is not None else self.sampler.draw(first, n)
        self._ahead, self._next = None, first + n
        if self._buffers is None:
            size = self.block
            index, model, start, places, seats = (t.new_zeros(size, *t.shape[1:]) for t in _tensors(fresh))
            self._buffers = BatchBlock(index, model, start, places, seats, {})
        for buffer, t in zip(_tensors(self._buffers), _tensors(fresh), strict=True):
            buffer[:n].copy_(t[:n])
        self._buffers.overflows.clear()
        self._buffers.overflows.update(fresh.overflows)
        self._position.zero_()

    def _draw_ahead(self) -> None:
        """Draw the next block beside this one's steps: drawing waits for the device, and need not wait for them."""
        if self._draws_ahead:
            with torch.cuda.stream(self._beside):
                self._ahead = self._next, list(self.streams.seeds), self.sampler.draw(self._next, self.block)

    def _launch(self) -> None:
        self._replayed(self._replay)

    def _replayed(self, replay: Replay) -> Any:
        """Its result: of the program that clips to the bound that there is."""
        bound = id(self.mechanism.bound), self.mechanism.bound._version
        if self._captured_bound not in (None, bound):
            raise PrivacyError(
                f"max_grad_norm={self.mechanism.bound.tolist()!r}: changed after the step was captured, which clips to what "
                "it was, so nothing was released. Make a new Stack."
            )
        result = replay()  # the first are run one by one: real steps, drawn and charged like any other
        if replay.graph is not None:
            self._captured_bound = bound
        return result

    def _step(self) -> None:
        block, at = self._buffers, self._position.view(1)
        assert block is not None
        batch = self._batch(*(t.index_select(0, at).squeeze(0) for t in _tensors(block)))
        self._update(self.gradients.clipped_sums(self._theta(), batch, self.mechanism.bound))

    def _step_in_parts(self, parts: Sequence[tuple[Tensor, ...]]) -> None:
        """A step whose batches do not fit: the same release, its sum added up over parts."""
        theta, total = self._theta(), None
        for part in parts:
            given = [theta, *part]
            self._given = self._given or [t.clone() for t in given]
            for buffer, t in zip(self._given, given, strict=True):
                buffer.copy_(t)
            sums = self._replayed(self._replay_part)
            total = sums.clone() if total is None else total + sums  # the next part is written to the same memory
        assert total is not None
        self._update(total)

    def _sums_of_part(self) -> Tensor:
        theta, *part = self._given
        return self.gradients.clipped_sums(theta, self._batch(*part), self.mechanism.bound)

    def _batch(self, index: Tensor, model: Tensor, start: Tensor, places: Tensor, seats: Tensor) -> Batch:
        inputs, labels, views = self.inputs[index], self.labels[index], self._views(index, model)
        return Batch(inputs, labels, model, start, places, seats, views)

    def _views(self, index: Tensor, model: Tensor) -> Tensor | None:
        """How each view is made: from its run's stream, by the example's number and the view's."""
        if self.augment is None:
            return None
        number = torch.arange(self.augment.views, device=index.device)
        element = index.unsqueeze(1) * self.augment.views + number
        return self.augment.choice(self.streams.words(model, element, self._at, VIEWS))

    def _theta(self) -> Tensor:
        eps = self.streams.normal(self._eps, self._at, POSTERIOR)
        return self._sample(eps, [p.state for p in self.parts])

    def _thetas(self, eps: Tensor, states: list[State]) -> Tensor:
        return torch.cat([p.rule.theta(s, eps[p.rows], p.hyper) for p, s in zip(self.parts, states, strict=True)])

    def _update(self, sums: Tensor) -> None:
        if self.mechanism.recording and not self.mechanism.record(sums, int(self._at)):
            raise _Another
        g = self.mechanism.release(sums, self._at)
        self._t += 1
        self._at += 1
        self._position += 1
        self._apply(g, self._eps, self._t, [p.state for p in self.parts])

    def _update_rows(self, g: Tensor, eps: Tensor, t: Tensor, states: list[State]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            new = part.rule.step(state, g[part.rows], eps[part.rows], t, part.hyper)
            for name, value in state.items():  # by our own names: a rule that forgets one must not pass unseen
                value.copy_(new[name])

    # ---- results, by the caller's numbering

    def _row(self, i: int) -> int:
        return self.order.index(i)

    @property
    def mean(self) -> Tensor:
        """[K, P], in the order of the stack."""
        return torch.cat([p.state["mean"] for p in self.parts])

    @property
    def average(self) -> Tensor:
        """[K, P] as well: the averaged iterates of the runs with ``ema``, the mean itself of the others."""
        return torch.cat([p.state.get("average", p.state["mean"]) for p in self.parts])

    @property
    def std(self) -> Tensor:
        """Posterior standard deviations, [K, P]; zero for point estimates."""
        return torch.cat([_std(p) for p in self.parts])

    def epsilon(self, i: int, delta: float) -> float:
        """ε that run i has spent."""
        return self.mechanism.accountants[self._row(i)].get_epsilon(delta)

    def model(self, i: int, *, averaged: bool = False) -> nn.Module:
        """Run i's network at its mean, or at the average of its iterates."""
        return self.network.model((self.average if averaged else self.mean)[self._row(i)])

    def posterior(self, i: int, *, averaged: bool = False) -> Posterior:
        """Run i's posterior under its network's own parameter names; around the average of its iterates if ``averaged``."""
        row = self._row(i)
        if averaged and not self.runs[row].averaged:
            raise bad("averaged", True, f"but run {i} keeps no average", 'Give it options={"ema": 0.99}')
        mean, std = (
            {n: p.detach().clone() for n, p in self.network.model(values[row]).named_parameters() if p.requires_grad}
            for values in (self.average if averaged else self.mean, self.std)
        )
        method = self.runs[row].method
        return Posterior(mean=mean, variance={n: s.square() for n, s in std.items()}, metadata={"method": method})


class _Another(Exception):
    """A step that was to repeat a lost one, and does not."""


def _check_seeds(runs: Sequence[Run], start: Tensor | None) -> None:
    """Two different runs with one seed share their noise: whoever sees both could subtract it. So do two that are alike but
    for the weights they start from."""
    known: dict[int, int] = {}
    for i, run in enumerate(runs):
        first = known.setdefault(run.seed, i)
        if runs[first] != run or (start is not None and not torch.equal(start[first], start[i])):
            raise bad(
                "seed", run.seed, "belongs to two different runs, which would share their noise", "Give each its own"
            )


@dataclass(frozen=True)
class _Part:
    """The rows of one method."""

    rule: Rows
    rows: slice
    state: State
    hyper: State


def _tensors(block: BatchBlock) -> tuple[Tensor, ...]:
    return block.index, block.model, block.start, block.places, block.seats


def _std(part: _Part) -> Tensor:
    h, state = part.hyper, part.state
    v = torch.zeros_like(state["mean"])
    if "hess" in state:
        v = variance(state["hess"], ess=h["ess"], weight_decay=damping(state, h))
        v = v * h["temperature"] if "temperature" in h else v
    if "spread" in state:
        v = v + state["spread"] * h["trace"]
    return v.sqrt()
