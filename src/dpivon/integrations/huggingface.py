"""Private fine-tuning of transformers: a loss with one part per example, and a ``Trainer`` that trains privately."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, IterableDataset

from dpivon.durable.files import replace
from dpivon.durable.ledger_mark import check_mark, mark
from dpivon.errors import DpivonError, PrivacyError, bad, check_number, check_whole, need
from dpivon.integrations.stepping import step_through
from dpivon.optim.ivon import IVON
from dpivon.posterior import Posterior
from dpivon.predict import entropy
from dpivon.privacy import DPOptimizer, PrivacyEngine
from dpivon.privacy.compiled import CompiledStep
from dpivon.privacy.gradients.model_io import IGNORED
from dpivon.privacy.losses import PerExampleLoss

need("accelerate", "huggingface")
need("transformers", "huggingface")
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402  (after the error that says how to get it)

POSTERIOR, LEDGER, ACCOUNT = "posterior.safetensors", "ledger.jsonl", "account.json"
_LOADED = (".safetensors", ".bin", ".pt", ".index.json")  # files of weights, or of an optimizer's state


class per_example_loss:
    """The loss of a transformer's outputs in which every example has a part of its own.

    >>> loss_fn = per_example_loss(model)
    >>> loss_fn(model(**inputs), labels).backward()

    L = (1/B) Σ_i ℓ_i, with ℓ_i the mean over the tokens of example i whose label is not -100: the loss that a model computes
    itself divides by such tokens of the whole batch, so that one example rescales all others. Labels are those that the model
    takes: a causal model's are shifted here. Classes, several labels and regression go by ``config.problem_type``.

    Args:
        model: of transformers, or its adapters of peft.
        loss_reduction: ``"mean"`` or ``"sum"``, as given to ``make_private``.
    """

    def __init__(self, model: nn.Module, loss_reduction: str = "mean") -> None:
        own: Any = model
        own = own.get_base_model() if hasattr(own, "get_base_model") else own
        kind, config = type(own).__name__, getattr(own, "config", None)
        shifts = "LMHeadModel" in kind or "ForCausalLM" in kind
        self._shifts = shifts and not getattr(config, "is_encoder_decoder", False)
        self._problem = getattr(config, "problem_type", None)
        self._reduced = PerExampleLoss(self.per_example, loss_reduction)

    def __call__(self, outputs: Any, labels: Tensor) -> Tensor:
        return self._reduced(outputs if isinstance(outputs, Tensor) else outputs["logits"], labels)

    def per_example(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[B], one loss per example."""
        if labels.is_floating_point():
            logits = logits.view_as(labels)
            several = self._problem == "multi_label_classification" or (self._problem is None and labels.dim() > 1)
            loss = F.binary_cross_entropy_with_logits if several else F.mse_loss
            return loss(logits, labels.to(logits), reduction="none").reshape(len(labels), -1).mean(1)
        if self._shifts:
            logits, labels = logits[:, :-1], labels[:, 1:]
        each = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none")
        tokens = labels.unsqueeze(1).flatten(1)  # [B, 1] where an example has one label; B may be 0
        return each.view_as(tokens).sum(1) / (tokens != IGNORED).sum(1).clamp(min=1)


@torch.no_grad()
def token_uncertainty(
    model: nn.Module,
    posterior: Posterior,
    inputs: Mapping[str, Tensor],
    samples: int = 8,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Entropy, and mutual information with the weights, of what follows every token: each [B, S], in nats.

    >>> answer = model.generate(prompt, max_new_tokens=20)
    >>> entropy, information = token_uncertainty(model, trainer.posterior(), {"input_ids": answer})
    >>> information[:, prompt.shape[1] - 1 : -1].mean(1)  # of each answer, by token

    Post-processing: it spends no privacy. The model runs in eval mode, as often as there are ``samples``.

    Args:
        model: a language model, or any whose outputs have ``logits`` [B, S, V].
        posterior: over (some of) its parameters.
        inputs: what the model takes.
        samples: how many draws are averaged.
        generator: source of the draws; torch's global one if None.
    """
    samples = check_whole("samples", samples, "Pass a whole number of draws", at_least=1)
    posterior, training = posterior.for_model(model), model.training
    model.eval()
    try:
        mean = spread = torch.zeros((), dtype=torch.float64)
        for _ in range(samples):
            logits = functional_call(model, posterior.sample(generator), kwargs=dict(inputs))["logits"]
            probs = logits.double().softmax(-1)
            mean, spread = mean.to(probs) + probs / samples, spread.to(probs) + entropy(probs) / samples
    finally:
        model.train(training)
    total = entropy(mean)
    return total, (total - spread).clamp_min(0)  # ≥ 0 by Jensen; rounding may disagree


class PrivateTrainer(Trainer):
    """``transformers.Trainer`` that trains privately: Poisson batches, clipped and noised gradients, every step charged.

    >>> trainer = PrivateTrainer(model, args, train_dataset=data, target_epsilon=8.0, delta=1e-5)
    >>> trainer.train()
    >>> trainer.epsilon, trainer.posterior()

    ``per_device_train_batch_size · gradient_accumulation_steps`` is the expected size of a Poisson batch; it is run in parts of
    ``per_device_train_batch_size``, and clipped, noised and charged once. The loss is :class:`per_example_loss`. Pass
    ``optimizers=(dpivon.IVON(…), None)`` for a posterior, which is saved beside the model as ``posterior.safetensors``.

    The step is that of :meth:`dpivon.PrivacyEngine.compile`, captured on a GPU where the model allows it; ``path`` says which
    was taken. For a loss of your own override :meth:`losses`.

    The ledger is ``output_dir/ledger.jsonl``, and ``train(resume_from_checkpoint=…)`` goes on with its account; a checkpoint
    without its ledger, or with files of another, is refused. ε is in the logs. The training loss is not, nor what
    depends on the size of a batch: private examples decide both, without noise.

    Args:
        model: as ``Trainer``'s.
        args: as ``Trainer``'s; ``max_grad_norm`` is C, the bound on an example's gradient.
        target_epsilon: choose σ for this ε over all epochs (or ``max_steps``) …
        delta: … at this δ, which is also that of the reported ε.
        noise_multiplier: σ, instead of ``target_epsilon``.
        engine: a :class:`dpivon.PrivacyEngine`; by default a new one with the ledger.
        private: more arguments of :meth:`dpivon.PrivacyEngine.make_private`.
        capture: as in :meth:`dpivon.PrivacyEngine.compile`: False for the eager step also on a GPU, as for batches that are
            padded to ever new lengths.
        **options: those of ``Trainer``.
    """

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        *,
        delta: float,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        engine: PrivacyEngine | None = None,
        private: Mapping[str, Any] | None = None,
        capture: bool | None = None,
        **options: Any,
    ) -> None:
        if (target_epsilon is None) == (noise_multiplier is None):
            problem = f"was given beside noise_multiplier={noise_multiplier!r}"
            raise bad("target_epsilon", target_epsilon, problem, "Give exactly one of the two")
        self.delta = check_number("delta", delta, "Use a probability well below 1/N", above=0.0, below=1.0)
        self.target_epsilon, self.noise_multiplier = target_epsilon, noise_multiplier
        _check(args, options)
        if type(self).compute_loss is not Trainer.compute_loss:
            problem = "is not called in training, which needs one loss per example"
            raise bad("compute_loss", f"{type(self).__name__}.compute_loss", problem, "Override losses(model, inputs)")
        self._part = args.per_device_train_batch_size
        self._expected = self._part * args.gradient_accumulation_steps
        args = copy.copy(args)
        args.gradient_accumulation_steps = 1  # a step of the Trainer is a logical batch
        args.ignore_data_skip = True  # after a resume batches are drawn anew
        super().__init__(model, args, **options)
        if not hasattr(self.train_dataset, "__len__") or isinstance(self.train_dataset, IterableDataset):
            fix = "Use a dataset with a length"
            raise bad("train_dataset", type(self.train_dataset).__name__, "cannot be Poisson sampled", fix)
        self.engine = PrivacyEngine(ledger=self._folder() / LEDGER) if engine is None else engine
        self._private = {"max_grad_norm": args.max_grad_norm, "wrap_model": False, **(private or {})}
        self._loss = per_example_loss(model)
        self._dp: DPOptimizer | None = None
        self._step: CompiledStep | None = None
        self._capture = capture
        self._inputs: dict[str, Any] | None = None  # the batch that the next step is of
        self._planned: int | None = None
        self.add_callback(_Budget(self))

    # ---- results

    @property
    def path(self) -> str:
        """``"captured"``, or ``"eager"`` with the reason."""
        return "not begun" if self._step is None else self._step.path

    @property
    def epsilon(self) -> float:
        """ε spent so far at δ."""
        return self.engine.get_epsilon(self.delta)

    def posterior(self) -> Any:
        """What was learnt, under the model's names."""
        if self._dp is None:
            raise DpivonError("posterior() before train(): nothing was trained. Call train() first.")
        return self._dp.posterior()

    # ---- making it private

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The Poisson loader; made with the private optimizer, at the first call."""
        if self._dp is not None:
            raise PrivacyError(
                "A second train() of one PrivateTrainer: the model is private already. Make a new one from its weights, with "
                "engine= to go on with this account."
            )
        model: Any = self.model
        optimizer = self.create_optimizer()
        collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        data: Any = self.train_dataset
        if hasattr(data, "column_names"):
            data, collate = self._remove_unused_columns(data, description="training"), self.data_collator
        loader: DataLoader[Any] = DataLoader(
            data,
            batch_size=self._expected,
            collate_fn=collate,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
        )
        given: dict[str, Any] = {
            "module": model.train(),
            "optimizer": optimizer,
            "data_loader": loader,
            **self._private,
        }
        if self.noise_multiplier is not None:
            made = self.engine.make_private(noise_multiplier=self.noise_multiplier, **given)
        else:
            assert self.target_epsilon is not None
            epochs = math.ceil(self.args.num_train_epochs)
            if self.args.max_steps > 0:
                epochs = math.ceil(self.args.max_steps / len(loader))
            made = self.engine.make_private_with_epsilon(
                target_epsilon=self.target_epsilon, target_delta=self.delta, epochs=epochs, **given
            )
            self._planned = epochs * len(made[2])
        _, self._dp, private_loader = made
        self.optimizer = self._dp
        self._step = self.engine.compile(self._losses, max_physical_batch_size=self._part, capture=self._capture)
        step_through(self._dp, self._make_step)
        return private_loader

    @property
    def budget_spent(self) -> bool:
        """Whether as many releases were charged as ``target_epsilon`` was planned for, also by a run that was resumed."""
        return self._planned is not None and len(self.engine.accountant) >= self._planned

    def losses(self, model: nn.Module, inputs: Any) -> Tensor:
        """[B], one loss per example of a training batch: that of :class:`per_example_loss`."""
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        return self._loss.per_example(outputs if isinstance(outputs, Tensor) else outputs["logits"], inputs["labels"])

    def _losses(self, model: nn.Module, inputs: Any) -> Tensor:
        with self.compute_loss_context_manager():
            return self.losses(model, inputs)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Note one logical batch, for the step that follows. Its loss stays there: what is returned is zero."""
        model.train()
        self._inputs = dict(inputs)
        return torch.zeros((), device=self.args.device)

    def _make_step(self, closure: Any) -> None:
        """One logical batch, in parts that fit into memory; the step that the Trainer asks of its optimizer."""
        assert self._step is not None
        if self._inputs is None:
            raise PrivacyError("optimizer.step() without a batch: nothing was released. Leave the step to train().")
        inputs, self._inputs = self._inputs, None
        self._step(inputs)

    def _folder(self, given: str | None = None) -> Path:
        return Path(given or self.args.output_dir or ".")

    def _clip_grad_norm(self, model: nn.Module) -> None:
        return None  # every example was clipped; what is raw stays unseen

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        return None

    # ---- going on from a checkpoint

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        noted = Path(output_dir) / ACCOUNT
        noted.unlink(missing_ok=True)  # of another run's checkpoint, which this one overwrites
        super()._save_optimizer_and_scheduler(output_dir)
        if self.engine.ledger is not None:
            paid = {**mark(self.engine.ledger.record), "files": _digests(Path(output_dir))}
            replace(noted, json.dumps(paid).encode())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        ledger, noted = self.engine.ledger, Path(checkpoint) / ACCOUNT
        if ledger is None or not noted.exists():
            problem = "the engine has no ledger" if ledger is None else f"it holds no {ACCOUNT}, so no account"
            fix = "Resume what was begun with a ledger, with that ledger, or load the weights and add their ε"
            raise bad("resume_from_checkpoint", checkpoint, problem, fix)
        paid = json.loads(noted.read_text(encoding="utf-8"))
        check_mark(ledger.path, ledger.record, paid)
        for name, digest in _digests(Path(checkpoint)).items():
            if paid.get("files", {}).get(name) != digest:
                problem = f"its {name} is not the one that was saved with its {ACCOUNT}, which need not cover it"
                fix = "Put back the files that were saved together, or resume another checkpoint"
                raise bad("resume_from_checkpoint", checkpoint, problem, fix)
        super()._load_optimizer_and_scheduler(checkpoint)

    # ---- what is said about private data

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # it would say how large each batch was

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        logs = {name: value for name, value in logs.items() if name not in ("loss", "train_loss", "total_flos")}
        if self._dp is not None and not any(name.startswith("eval_") for name in logs):
            logs["epsilon"] = self.epsilon
        super().log(logs, *args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self._dp is not None and isinstance(self._dp.original_optimizer, IVON):
            self.posterior().save(self._folder(output_dir) / POSTERIOR)


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file that a resume may read weights or optimizer state from; adapters may be in folders."""
    found = {}
    for path in (p for p in (*folder.glob("*"), *folder.glob("*/*")) if p.name.endswith(_LOADED)):
        with path.open("rb") as file:
            found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


class _Budget(TrainerCallback):
    """Ends training where the budget does: a run that was resumed has charged steps that were lost."""

    def __init__(self, trainer: PrivateTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> Any:
        control.should_training_stop = control.should_training_stop or self._trainer.budget_spent
        return control


def _check(args: TrainingArguments, options: Mapping[str, Any]) -> None:
    """Refuse what would reach raw gradients, or say more of a batch than its release does."""
    for name, harmless, why in (
        ("fp16", False, "would clip scaled gradients"),
        ("torch_compile", False, "would hide the layers that are clipped"),
        ("label_smoothing_factor", 0.0, "is not part of the loss per example"),
        ("auto_find_batch_size", False, "would release a batch twice"),
        ("include_num_input_tokens_seen", "no", "would say how large each batch was"),
        ("deepspeed", None, "would sum raw gradients across processes"),
        ("use_liger_kernel", False, "would hide the layers that are clipped"),
        ("neftune_noise_alpha", None, "changes the model's layers"),
    ):
        value = getattr(args, name, harmless)
        if value not in (harmless, None, False):
            raise bad(name, value, why, f"Leave it at {harmless!r}")
    if args.world_size > 1 or args.n_gpu > 1:
        problem = "would sum raw gradients across devices"
        raise bad(
            "world_size", max(args.world_size, args.n_gpu), problem, "Show one device, as by CUDA_VISIBLE_DEVICES=0"
        )
    if not args.max_grad_norm or not args.max_grad_norm > 0:
        raise bad("max_grad_norm", args.max_grad_norm, "is C, which bounds an example", "Use a value such as 1.0")
    if options.get("compute_loss_func") is not None:
        fix = "Leave it out, or train in a loop of your own with dpivon.PerExampleLoss"
        raise bad("compute_loss_func", options["compute_loss_func"], "divides by the tokens of the whole batch", fix)


__all__ = ["PrivateTrainer", "per_example_loss", "token_uncertainty"]
