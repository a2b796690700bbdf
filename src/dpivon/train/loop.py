"""What a configuration is trained with: seeds, data, network, method and decisions, in a kept run."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpivon.errors import bad
from dpivon.gaussian import regression_scores
from dpivon.metrics import accuracy, nll
from dpivon.multilabel import label_scores, macro, multilabel_loss
from dpivon.privacy import PerExampleLoss, PrivacyEngine
from dpivon.privacy.accounting.history import Entry
from dpivon.privacy.counting import NoisySums, class_counts, class_factors, class_thresholds, sets_cost, shares_cost
from dpivon.privacy.kernels.reference import autocast
from dpivon.privacy.noise import SecureNoise, TorchNoise, seed_of
from dpivon.privacy.people import People
from dpivon.privacy.temperature import calibrate_temperature
from dpivon.recipe import Calibration
from dpivon.sources import Examples
from dpivon.train.artefacts import Line
from dpivon.train.config import COUNT, Config, fixed
from dpivon.train.earlier import Earlier
from dpivon.train.kept import KeptRun, at_once, loader_of
from dpivon.train.last_layer import LastLayer
from dpivon.train.published import Description, Published, assembled

HELDOUT_DRAWS = 8


@dataclass(frozen=True)
class Seeds:
    """One for each purpose; from the operating system, unless somebody wants the same run again.

    ``after`` is what a run started from, if that was an earlier run: with the same seed its noise must be another.
    """

    seed: int | None
    after: str = ""

    def number(self, purpose: str) -> int:
        if self.seed is None:
            return secrets.randbits(62)
        return seed_of(f"{self.seed} {purpose}" + (f" after {self.after}" if self.after else ""))

    def generator(self, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
        return torch.Generator(device).manual_seed(self.number(purpose))


class Sums:
    """What was released besides gradients, kept in the checkpoints."""

    def __init__(self) -> None:
        self.counts: list[float] = []
        self.temperature: list[float] = []
        self.factors: list[float] = []
        self.thresholds: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Loop(KeptRun):
    """A run that trains, or goes on training, in a folder, as its configuration says."""

    def __init__(
        self,
        config: Config,
        description: Description,
        examples: Examples,
        folder: Path,
        people: People | None = None,
        earlier: Earlier | None = None,
        layer: LastLayer | None = None,
    ) -> None:
        self.config, self.description, self.earlier = config, description, earlier
        self.device = device_of(config.device)
        assert examples.targets is not None
        posterior = None if earlier is None else earlier.published.posterior
        self.seeds = seeds = Seeds(config.seed, "" if posterior is None else posterior.digest)
        torch.manual_seed(seeds.number("weights"))
        start, features = posterior or config.start_from, None if layer is None else layer.features
        trace = None if layer is None else config.temperature.trace
        learner = description.learner(seeds.generator("theta", self.device), config.ema, start, features, trace)
        learner.model.to(self.device)
        engine = PrivacyEngine(accountant=config.accountant, secure_mode=config.secure)
        own = config.seed is not None and not config.secure
        # Weighted example by example: a mean over the batch's weights would let one example rescale the others.
        self.weights = torch.ones(len(config.classes), device=self.device)
        loss = PerExampleLoss(nn.CrossEntropyLoss(weight=self.weights if config.weighted_loss else None))
        if description.noise is not None:
            loss = PerExampleLoss(description.noise)
        elif config.labels:
            loss = PerExampleLoss(multilabel_loss)
        self.examples, self.people, self.layer, self.sums = examples, people, layer, Sums()
        data = examples.inputs, examples.targets
        if layer is not None:
            data = data[0][~layer.held_out], data[1][~layer.held_out]
        most = at_once(config.physical_batch_size, learner.model, data, self.device)
        made = learner.make_private_with_epsilon(
            engine,
            loader_of(data, self.device, config.expected_batch, seeds.generator("batches") if own else None),
            target_epsilon=config.epsilon,
            target_delta=config.delta,
            epochs=config.epochs,
            max_grad_norm=config.max_grad_norm,
            dataset_size=config.trained_on,
            expected_batch_size=config.expected_batch,
            also=[*config.also, *(() if earlier is None else earlier.history)],
            noise_generator=seeds.generator("noise", self.device) if own else None,
            criterion=loss,
            user_ids=people,
        )
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32

        def losses(model: nn.Module, batch: Any) -> Tensor:
            with autocast(self.device, dtype):
                found: Tensor = loss.per_example(model(batch[0]), batch[1])
            return found

        super().__init__(
            folder,
            engine,
            learner,
            made,
            losses,
            epochs=config.epochs,
            delta=config.delta,
            config=fixed(config),
            physical_batch_size=most,
            checkpoint_seconds=config.checkpoint_seconds,
            also={"sums": self.sums} if config.also else None,
            dataset_digest="" if layer is None else layer.digest(examples),
        )

    def train(self, heldout: Examples | None, show: Callable[[Line | None, int], None]) -> None:
        """To the end of the plan or of the budget. ``show(line, step)``: after every step, with a line after an evaluation."""
        self.run(show, lambda: self._scores(heldout))

    def _restored(self) -> None:
        self._decide()

    def _decide(self) -> None:
        """How the model will answer, and what classes weigh in its loss: before the first step, counted if that is wanted."""
        config = self.config
        if config.prior == COUNT and not self.sums.counts:
            assert self.examples.targets is not None
            self.sums.counts = class_counts(
                self.examples.targets, len(config.classes), self._noisy("counts", self._shares, self.people)
            )
            self._save()  # a crash before it costs the count once more
        self.decision = config.decision(self.sums.counts or None)
        if self.decision.weights:
            self.weights.copy_(torch.tensor(self.decision.weights))

    def calibrate(self, rows: Examples | None, people: People | None) -> None:
        """A last layer's temperature; then factors by the classes' shares, and thresholds of sets from ``rows``, if any."""
        config, sums = self.config, self.sums
        if self.layer is not None and config.temperature.noise_multiplier is not None and not sums.temperature:
            sums.temperature = [self._temperature(self.layer.held_out, config.temperature)]
            self._save()
        self.decision = self.decision.model_copy(update={"temperature": (sums.temperature or [1.0])[0]})
        shares = [share for own in self.decision.each or (self.decision,) for share in own.prior]
        if shares and not sums.factors:
            counts = sums.counts or [config.dataset_size * share for share in shares]
            noisy = self._noisy("factors", self._shares, self.people)
            sums.factors = list(class_factors(self._predicted(self.examples), counts, noisy))
            self._save()
        self.decision = self.decision.with_factors(tuple(sums.factors))
        if rows is not None and not sums.thresholds:
            assert config.coverage is not None
            assert rows.targets is not None
            noisy = self._noisy("sets", sets_cost(config.epsilon, config.delta), people)
            sums.thresholds = list(class_thresholds(self._predicted(rows), rows.targets, config.coverage, noisy))
            self._save()
        self.decision = self.decision.model_copy(update={"thresholds": tuple(sums.thresholds)})

    def _temperature(self, held_out: Tensor, plan: Calibration) -> float:
        """T, chosen on the examples that are held out, or on all where none were to be."""
        assert self.examples.targets is not None
        rows = self.examples.inputs, self.examples.targets
        rows = (rows[0][held_out], rows[1][held_out]) if plan.held_out else rows
        generator = self.seeds.generator("temperature") if self._seeded else None
        chosen: dict[str, Any] = {"noise_multiplier": plan.noise_multiplier, "generator": generator}
        return calibrate_temperature(self._published(), rows, account=self.engine, **chosen).temperature

    def _published(self) -> Published:
        """As it predicts when it is published, but that a last layer takes features: examples are that here."""
        features = None if self.layer is None else self.layer.features
        return replace(assembled(self.description, self.learner.posterior(), self.decision, features), features=None)

    def _predicted(self, rows: Examples) -> Tensor:
        return self._published().predict(rows.inputs).probs.cpu()

    @property
    def _seeded(self) -> bool:
        return self.config.seed is not None and not self.config.secure

    @property
    def _shares(self) -> Entry:
        return shares_cost(self.config.epsilon, self.config.delta, counted=self.config.prior == COUNT)

    def _noisy(self, purpose: str, cost: Entry, people: People | None) -> NoisySums:
        noise = TorchNoise(self.seeds.generator(purpose)) if self._seeded else SecureNoise()
        return NoisySums(cost[0], noise, self.engine._charge, people)

    def _scores(self, heldout: Examples | None) -> dict[str, float]:
        if heldout is None or heldout.targets is None:
            return {}
        generator = torch.Generator().manual_seed(0)
        draws = min(HELDOUT_DRAWS, self.config.samples)
        if (noise := self.description.noise) is not None:
            options = {"generator": generator, "likelihood": "gaussian", "noise_variance": noise.moments}
            found = self.description.in_units(self.learner.predict(heldout.inputs, draws, **options))
            return {"heldout_nll": regression_scores(found, self.description.target_values(heldout))["nll"]}
        if self.config.labels:
            found = self.learner.predict(heldout.inputs, draws, generator=generator, likelihood="multilabel")
            mean = macro(label_scores(found.probs.cpu(), heldout.targets))
            return {"heldout_nll": mean["nll"], "heldout_accuracy": mean["accuracy"]}
        probs = self.learner.predict(heldout.inputs, draws, generator=generator).probs.cpu()
        right = accuracy(probs, heldout.targets)
        return {"heldout_nll": nll(probs, heldout.targets), "heldout_accuracy": right}


def device_of(name: str) -> torch.device:
    fix = "Use cpu, or cuda where there is a GPU"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise bad("device", name, "is not a known device", fix) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise bad("device", name, "there is no GPU that torch can use", fix)
    return device
