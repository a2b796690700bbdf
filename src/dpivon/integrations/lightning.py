"""Private training in a Lightning ``Trainer``: one callback, and the LightningModule as it is."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpivon.durable.ledger_mark import check_mark, mark
from dpivon.errors import DpivonError, PrivacyError, PrivacyWarning, bad, check_number, need
from dpivon.integrations.stepping import step_through
from dpivon.privacy import DPOptimizer, PrivacyEngine
from dpivon.privacy.compiled import CompiledStep, LossFn
from dpivon.privacy.made_up import NotTried

need("lightning.pytorch", "lightning")
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402  (after the error that says how to get it)
from lightning.pytorch.strategies import SingleDeviceStrategy  # noqa: E402

_PRECISIONS = ("32-true", "64-true", "bf16-mixed")


class PrivateTraining(Callback):  # type: ignore[misc]
    """Makes ``trainer.fit`` private: Poisson batches, clipped and noised gradients, every step charged.

    >>> private = PrivateTraining(target_epsilon=8.0, delta=1e-5, max_grad_norm=1.0)
    >>> Trainer(max_epochs=10, callbacks=[private]).fit(module, loader)
    >>> private.epsilon, private.posterior()

    ``configure_optimizers`` returns one optimizer: :class:`dpivon.IVON` or any of ``torch.optim``, with schedulers if you like.
    ``training_step`` returns the mean loss of the batch and calls the network as ``self(x)``; or name the submodule that holds
    all trainable parameters, ``network="net"``, and call that. For IVON the step is run at a draw of θ, or
    at several (``mc_samples``). ε is logged as ``epsilon`` at the end of every epoch.

    With ``loss_fn`` the step is that of :meth:`dpivon.PrivacyEngine.compile`, captured on a GPU, and ``training_step`` is not
    called. ``path`` says which step was taken.

    ``trainer.fit(…, ckpt_path=…)`` goes on with the account if ``engine`` has the ledger that the run was begun with. Noise and
    batches are new from there, steps that were lost stay charged, and training stops where the budget does.

    Refused, because the guarantee would not hold or could not be checked: manual optimization (and with it several
    optimizers), gradient accumulation by the Trainer, its gradient clipping, more than one device, fp16, a checkpoint
    without its ledger, reloading of data loaders. What ``training_step`` logs is a function of private examples and is
    warned of.

    Args:
        delta: δ of the reported ε, and of ``target_epsilon``.
        max_grad_norm: C.
        target_epsilon: choose σ for this ε over ``epochs`` (the Trainer's ``max_epochs`` by default) …
        noise_multiplier: … or give σ.
        network: name of the submodule to train, if it is not the LightningModule itself.
        engine: a :class:`dpivon.PrivacyEngine`; a new one by default.
        loss_fn: ``loss_fn(model, batch)`` returns one loss per example; the model is the LightningModule, or ``network``.
        capture: with ``loss_fn``, as in :meth:`dpivon.PrivacyEngine.compile`: False for the eager step also on a GPU.
        **options: those of :meth:`dpivon.PrivacyEngine.make_private`.
    """

    def __init__(
        self,
        *,
        delta: float,
        max_grad_norm: float,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        epochs: int | None = None,
        network: str | None = None,
        engine: PrivacyEngine | None = None,
        loss_fn: LossFn | None = None,
        capture: bool | None = None,
        **options: Any,
    ) -> None:
        if (target_epsilon is None) == (noise_multiplier is None):
            problem = f"was given beside noise_multiplier={noise_multiplier!r}"
            raise bad("target_epsilon", target_epsilon, problem, "Give exactly one of the two")
        for name in ("wrap_model", "criterion", "poisson_sampling"):
            if name in options:
                raise bad(name, options[name], "is decided by the callback", "Leave it out")
        if options.get("grad_sample_mode") == "ghost":
            problem = "returns a criterion, and the loss is inside training_step"
            raise bad("grad_sample_mode", "ghost", problem, "Leave it out")
        if capture and loss_fn is None:
            problem = "but training_step returns one loss for the batch"
            raise bad("capture", capture, problem, "Give loss_fn too, which returns one loss per example")
        self.delta = check_number("delta", delta, "Use a probability well below 1/N", above=0.0, below=1.0)
        self.max_grad_norm, self.target_epsilon, self.noise_multiplier = max_grad_norm, target_epsilon, noise_multiplier
        self.epochs, self.network, self.options = epochs, network, options
        self.engine = PrivacyEngine() if engine is None else engine
        self.loss_fn, self.capture = loss_fn, capture
        self.optimizer: DPOptimizer | None = None
        self._step: CompiledStep | None = None
        self._most: int | None = None  # releases, if this fit goes on with a plan for target_epsilon
        self._noted: dict[str, Any] | None = None  # of the ledger, by the checkpoint that is resumed
        self._metrics: set[str] = {"epsilon"}

    # ---- results

    @property
    def path(self) -> str:
        """``"captured"``, or ``"eager"`` with the reason."""
        if self.loss_fn is None:
            return "eager (no loss_fn: training_step returns one loss for the batch)"
        return "not begun" if self._step is None else self._step.path

    @property
    def epsilon(self) -> float:
        """ε spent so far at δ."""
        return self.engine.get_epsilon(self.delta)

    def posterior(self) -> Any:
        """What was learnt, under the names of the trained network (of ``network``, where that was given)."""
        if self.optimizer is None:
            raise DpivonError("posterior() before fit: nothing was trained. Call trainer.fit with this callback first.")
        return self.optimizer.posterior()

    # ---- making it private

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check(trainer, pl_module)
        source = trainer.fit_loop._data_source
        loader = source.dataloader()
        if not isinstance(loader, DataLoader):
            raise bad(
                "train_dataloaders", type(loader).__name__, "is not one DataLoader", "Give fit a single DataLoader"
            )
        made = self._make_private(trainer, self._network(pl_module), trainer.optimizers[0], loader)
        _, self.optimizer, private_loader = made
        trainer.strategy.optimizers = [self.optimizer]
        if trainer.ckpt_path is not None and self.target_epsilon is not None:
            self._most = self._epochs(trainer) * len(private_loader)
        if self.loss_fn is None:
            self._check_loss(pl_module)
        else:
            self._compile(trainer, self.loss_fn)
        # The one place that is not public in Lightning. Should it ever stop working, the first step is refused, since no batch
        # was drawn for it: DPOptimizer counts draws of its own loader.
        source.instance = private_loader

    def _compile(self, trainer: Trainer, loss_fn: LossFn) -> None:
        """Make Lightning's training step the compiled one."""
        assert self.optimizer is not None

        def losses(model: nn.Module, batch: Any) -> Tensor:
            with trainer.precision_plugin.train_step_context():  # of the loss alone: clipping and noise stay outside
                return loss_fn(model, batch)

        step = self._step = self.engine.compile(losses, capture=self.capture)
        # Lightning calls backward on what its step returns: on a number that depends on nothing.
        vars(trainer.strategy)["training_step"] = lambda batch, *_: step(batch).detach().requires_grad_()
        step_through(self.optimizer, lambda closure: closure())

    def _check_loss(self, pl_module: LightningModule) -> None:
        """Try training_step on made-up batches, without its logs; where it takes none, the first step says so."""

        def loss_fn(model: nn.Module, batch: Any) -> Any:
            found = pl_module.training_step(batch, 0)
            return found["loss"] if isinstance(found, dict) else found

        quiet = {name: lambda *args, **kwargs: None for name in ("log", "log_dict")}
        vars(pl_module).update(quiet)
        try:
            self.engine.check(loss_fn)
        except NotTried:
            pass
        finally:
            for name in quiet:
                del vars(pl_module)[name]

    def _make_private(self, trainer: Trainer, network: nn.Module, optimizer: Any, loader: DataLoader[Any]) -> Any:
        shared = {
            "module": network,
            "optimizer": optimizer,
            "data_loader": loader,
            "max_grad_norm": self.max_grad_norm,
            "wrap_model": False,
            **self.options,
        }
        if self.noise_multiplier is not None:
            return self.engine.make_private(noise_multiplier=self.noise_multiplier, **shared)
        assert self.target_epsilon is not None
        return self.engine.make_private_with_epsilon(
            target_epsilon=self.target_epsilon, target_delta=self.delta, epochs=self._epochs(trainer), **shared
        )

    def _epochs(self, trainer: Trainer) -> int:
        epochs: int | None = trainer.max_epochs if self.epochs is None else self.epochs
        if epochs is None or epochs < 1:
            problem = "and the Trainer has no max_epochs, so the noise for target_epsilon cannot be chosen"
            raise bad("epochs", self.epochs, problem, "Give the Trainer max_epochs, or this callback epochs")
        return epochs

    def _network(self, pl_module: LightningModule) -> nn.Module:
        if self.network is None:
            return pl_module
        try:
            return pl_module.get_submodule(self.network)
        except AttributeError:
            names = ", ".join(repr(name) for name, _ in pl_module.named_children())
            raise bad("network", self.network, "is no submodule", f"It has {names}") from None

    def _check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.optimizer is not None:
            raise PrivacyError(
                "A second fit with one PrivateTraining: the module is already private. Make a new callback (with engine= to go "
                "on with this account) and a new module from its state_dict."
            )
        if not pl_module.automatic_optimization:
            problem = "lets training_step reach raw gradients"
            raise bad("automatic_optimization", False, problem, "Leave it True; training_step returns the loss")
        if trainer.world_size != 1 or not isinstance(trainer.strategy, SingleDeviceStrategy):
            given = f"{type(trainer.strategy).__name__} on {trainer.world_size} device(s)"
            raise bad("strategy", given, "would sum raw gradients across processes", "Use Trainer(devices=1)")
        if trainer.precision not in _PRECISIONS:
            problem = "would clip scaled or rounded gradients"
            raise bad("precision", trainer.precision, problem, f"Use one of {', '.join(map(repr, _PRECISIONS))}")
        if trainer.ckpt_path is not None:
            self._check_account(str(trainer.ckpt_path))
        for name, harmless, why in (
            ("accumulate_grad_batches", 1, "batches would be summed before clipping"),
            ("gradient_clip_val", None, "is not the clipping that the noise is calibrated to"),
            ("reload_dataloaders_every_n_epochs", 0, "would bring back batches that are not Poisson samples"),
            ("overfit_batches", 0.0, "would bring back batches that are not Poisson samples"),
        ):
            if getattr(trainer, name) not in (harmless, None):
                raise bad(name, getattr(trainer, name), why, f"Leave it at {harmless!r}; a large batch_size is fine")

    # ---- going on from a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of Lightning notes of the account: which ledger, and how much is in it."""
        return {} if self.engine.ledger is None else mark(self.engine.ledger.record)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._noted = None  # of a checkpoint that was loaded before this one

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._noted = state_dict

    def _check_account(self, path: str) -> None:
        ledger = self.engine.ledger
        if ledger is None:
            fix = "Give engine=PrivacyEngine(ledger=…) with the ledger that the run was begun with"
            raise bad("ckpt_path", path, "holds no account of what was spent, and the engine has no ledger", fix)
        if not self._noted:
            fix = "Resume what was begun with engine=PrivacyEngine(ledger=…), or load the weights and add their ε"
            raise bad("ckpt_path", path, "was not written by a run with a ledger", fix)
        check_mark(ledger.path, ledger.record, self._noted)

    # ---- what is said about private data

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._warn_of_new_metrics(trainer)
        if self._most is not None and len(self.engine.accountant) >= self._most:
            trainer.should_stop = True  # steps that were lost are charged, so the budget ends before the epochs do

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._warn_of_new_metrics(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._metrics |= trainer.callback_metrics.keys()  # of other data; what they reveal is not ours to say

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._warn_of_new_metrics(trainer)
        pl_module.log("epsilon", self.epsilon, prog_bar=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        vars(trainer.strategy).pop("training_step", None)  # the Trainer may fit something else next

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        vars(trainer.strategy).pop("training_step", None)
        self._warn_of_new_metrics(trainer)  # those logged once an epoch are known only now

    def _warn_of_new_metrics(self, trainer: Trainer) -> None:
        new = sorted(trainer.callback_metrics.keys() - self._metrics)
        self._metrics |= set(new)
        if new:
            warnings.warn(
                f"training_step logged {', '.join(map(repr, new))}: computed from private examples without noise, so ε does "
                "not cover who sees it, nor checkpoints or stopping chosen by it. Log on public validation data instead.",
                PrivacyWarning,
                stacklevel=2,
            )


__all__ = ["PrivateTraining"]
