"""PrivacyEngine: turn a model, an optimizer and a data loader into their private counterparts, in Opacus's words."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpivon.durable.ledger import Ledger
from dpivon.errors import PrivacyError, PrivacyWarning, bad, check_whole
from dpivon.optim.ivon import IVON
from dpivon.privacy.accounting import DEFAULT, Accountant, Limit
from dpivon.privacy.accounting.history import History
from dpivon.privacy.accounting.recorded import replay
from dpivon.privacy.clipping import Clipping, make_clipping
from dpivon.privacy.compiled import Compiles
from dpivon.privacy.forward_watch import ForwardWatch
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.gradients.model_io import BookKeepingHooks, BookKeepingModule
from dpivon.privacy.guards import check_model, check_optimizer
from dpivon.privacy.handed_over import batch_structure, check_mode, planned, try_criterion, try_loss
from dpivon.privacy.independence import check_model_rows
from dpivon.privacy.losses import PerExampleLoss, check_criterion
from dpivon.privacy.mechanism import Mechanism, NoiseSpec, check_mechanism
from dpivon.privacy.noise import SecureNoise, TorchNoise, check_noise_alone, own_generator
from dpivon.privacy.opacus_names import OpacusVerbs
from dpivon.privacy.optimizer import DPOptimizer
from dpivon.privacy.people import People
from dpivon.privacy.physical_batch import Fits
from dpivon.privacy.ranks.group import Group, current
from dpivon.privacy.ranks.start import choose_team, starting, unwrap_parallel
from dpivon.privacy.ranks.states import FollowedLedger, open_ledger
from dpivon.privacy.ranks.team import Sharded
from dpivon.privacy.resume import refresh
from dpivon.privacy.sampling import PoissonDataLoader, declare, poisson_loader, refuse_whole_batches


class PrivacyEngine(OpacusVerbs, Compiles, Fits):
    """Makes training private and keeps its account.

    >>> engine = PrivacyEngine()
    >>> model, optimizer, loader = engine.make_private(
    ...     module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    ... )
    >>> ...  # the ordinary training loop
    >>> engine.get_epsilon(delta=1e-5)

    Args:
        accountant: ``"pld"`` (the tightest), ``"prv"`` or ``"rdp"`` (the paper's).
        secure_mode: draw noise and batches from the operating system's cryptographic generator.
        generator: seeds the generators of noise and batches, for experiments on public data that others shall repeat; the
            ledger then says "seeded". By default the operating system seeds them, and ``torch.manual_seed`` changes neither.
            ``generator=torch.default_generator`` is Opacus's behaviour.
        orders: Rényi orders, ``"wide"`` or ``"opacus"``.
        ledger: a file that records every release before it is made, as :meth:`attach_ledger`.
        distributed: with a process group of ``torch.distributed``, train one model on all ranks: every rank makes the same
            calls, and each gets its part of every batch. False trains alone, as when ranks train models of their own.
        replica_check_every: how many releases apart the ranks compare their weights and optimizer state; 0 never.
    """

    def __init__(
        self,
        *,
        accountant: str = DEFAULT,
        secure_mode: bool = False,
        orders: str | Sequence[float] = "wide",
        ledger: str | os.PathLike[str] | None = None,
        generator: torch.Generator | None = None,
        distributed: bool = True,
        replica_check_every: int = 100,
    ) -> None:
        if generator is not None and not hasattr(generator, "get_state"):
            fix = "Use torch.Generator().manual_seed(seed), or leave it out"
            raise bad("generator", generator, "is not a torch.Generator", fix)
        if generator is not None and secure_mode:
            raise bad("generator", generator, "contradicts secure_mode=True", "Leave one of them out")
        self._seeded_by = generator
        fix = "Use a number of releases such as 100, or 0 for never"
        self.replica_check_every = check_whole("replica_check_every", replica_check_every, fix)
        self._distributed = distributed
        self.accountant = Accountant(accountant, orders=orders)
        self.secure_mode = secure_mode
        self._dataset: Any = None
        self._dataset_size: int | None = None
        self._loader: DataLoader[Any] | None = None  # of the last make_private
        self._limit: Limit | None = None
        self.ledger: Ledger | FollowedLedger | None = None
        self._inherited = 0  # releases that the ledger held when it was attached
        self._made: list[weakref.ref[DPOptimizer]] = []
        self._noise: list[torch.Generator | None] = []  # of all that were made: what they released outlives them
        if ledger is not None:
            self.attach_ledger(ledger)

    def __deepcopy__(self, memo: dict[int, Any]) -> PrivacyEngine:
        return self  # there is one account; a copied optimizer goes on charging it

    # ---- making things private

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        criterion: Any = None,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str | Clipping = "flat",
        mechanism: str | Mechanism = "gaussian",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str | None = None,
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        dataset_size: int | None = None,
        expected_batch_size: float | None = None,
        augmentations: int = 1,
        user_ids: Any = None,
        rows_per_user: int | None = None,
        user_gradient: str = "mean",
        unchecked: bool = False,
    ) -> Any:
        """The private counterparts ``(module, optimizer, data_loader)``.

        Before the first step, and whenever the inputs change their structure, the model is tried on made-up inputs: rows
        together must give what rows give alone (:mod:`dpivon.privacy.independence`). :meth:`check` does the same with the loss.

        Args:
            module: the model. Its layers must not mix examples (no BatchNorm).
            optimizer: :class:`dpivon.IVON` for a posterior, or any ``torch.optim`` optimizer (DP-SGD, DP-Adam, …).
            data_loader: its dataset and batch size are kept, its sampler is replaced by Poisson sampling.
            noise_multiplier: σ. With 0 training runs, recorded as non-private.
            max_grad_norm: C; a list of bounds, one per parameter, with ``clipping="per_layer"``.
            criterion: the loss, to be checked: a mean that divides by anything but the rows of the batch is refused.
            batch_first: whether the batch is dimension 0 (True) or 1.
            loss_reduction: whether your loss is the ``"mean"`` or the ``"sum"`` over the batch.
            poisson_sampling: with False your loader is used as it is, recorded as non-private.
            clipping: ``"flat"``, ``"per_layer"`` or a rule of your own (``privacy.clipping.register_clipping``).
            mechanism: ``"gaussian"`` or one of your own (``privacy.mechanism.register_mechanism``).
            noise_generator: source of the noise, for reproducible experiments. Who knows its seed can remove the noise.
            grad_sample_mode: accepted for people from Opacus. All of ``"hooks"``, ``"functorch"``, ``"ew"`` and ``"ghost"``
                mean ``"bookkeeping"``; the first three leave ``p.grad_sample`` as Opacus does, and with ``"ghost"`` the
                result is ``(module, optimizer, criterion, data_loader)``.
            wrap_model: False attaches hooks to the model instead of wrapping it; go on using your own model then.
            rand_on_empty: accepted for compatibility; True would double the sensitivity and is refused.
            dataset_size: the public N, if it is not simply ``len(dataset)``, or the number of people.
            expected_batch_size: the public b, if it is not the loader's batch size. q = b/N.
            augmentations: M consecutive rows of a batch are one example; gradients are averaged over them before clipping.
            user_ids: whose each row of the data set is, for privacy per person: people are drawn instead of rows, N and b
                count people, and a person's gradient is clipped once. Rows must reach the model in the loader's order.
            rows_per_user: at most so many rows of a person in a batch, drawn afresh every time; None for all of them.
            user_gradient: a person's gradient is the ``"mean"`` over their rows, so that all people have one weight and C is on
                the scale of one row's gradient; or the ``"sum"``. Your loss is the mean (or sum) over rows, as ever.
            unchecked: train although the model cannot be tried on made-up inputs. You answer for it that no row of a batch
                depends on another; the ledger records it.
        """
        group = self._group()
        with starting(group, afresh=self._inherited > 0) as start:  # which speaks to other ranks when all here is made
            module = unwrap_parallel(module, wrap_model)
            mode = check_mode(grad_sample_mode)
            check_model(module)
            optimizer = check_optimizer(module, optimizer)
            if rand_on_empty:
                raise bad("rand_on_empty", True, "would double the sensitivity of a batch", "Leave it False")
            if noise_generator is not None and self.secure_mode:
                raise bad("noise_generator", noise_generator, "contradicts secure_mode=True", "Leave one of them out")
            drawing = {f"the noise of optimizer {i} of this engine": drew for i, drew in enumerate(self._noise)}
            drawing["the data loader's generator"] = data_loader.generator
            drawing["the optimizer's generator"] = getattr(optimizer, "generator", None)
            check_noise_alone(noise_generator, drawing)
            people = People.given(user_ids, rows_per_user, user_gradient, poisson_sampling=poisson_sampling)
            public: dict[str, Any] = {"dataset_size": dataset_size, "expected_batch_size": expected_batch_size}
            sampling = declare(data_loader, **public, people=people)
            trainable = sum(p.requires_grad for p in module.parameters())
            clip = make_clipping(clipping, max_grad_norm, trainable)
            spec = NoiseSpec(
                noise_multiplier=noise_multiplier,
                max_grad_norm=clip.sensitivity,
                expected_batch_size=sampling.expected_batch_size,
                sample_rate=sampling.sample_rate,
                loss_reduction=loss_reduction,
                poisson=poisson_sampling,
                unchecked=unchecked,
                mechanism=check_mechanism(mechanism),
                clipping=clip.name,
                unit="" if people is None else people.unit,
            )
            self.accountant.keep_unit(spec.unit)
            augmentations = check_whole("augmentations", augmentations, "Use 1 for none", at_least=1)
            if mode == "ghost":  # whose criterion takes the mean itself
                criterion = PerExampleLoss(criterion or nn.CrossEntropyLoss(reduction=loss_reduction), loss_reduction)
            check_criterion(criterion, loss_reduction)
            layout: dict[str, Any] = {"batch_first": batch_first, "loss_reduction": loss_reduction}
            layout["augmentations"] = augmentations
            checked = None if unchecked else try_criterion(criterion, module, data_loader, layout)
            team = choose_team(group, module, optimizer, self.replica_check_every)
            loader: DataLoader[Any] = data_loader
            if poisson_sampling:
                loader = poisson_loader(
                    data_loader,
                    sampling,
                    batch_first=batch_first,
                    parent=self._seeded_by,
                    secure=self.secure_mode,
                    part=(0, 1) if team is None else (team.rank, team.world),
                    people=people,
                )
            elif team is not None:
                refuse_whole_batches(data_loader, team.world)
            keeper = BookKeeper(
                module,
                **layout,
                people=None if people is None else people.groups(loader, layout),
                samples=optimizer.mc_samples if isinstance(optimizer, IVON) else 1,
                scatter=team.scatter if isinstance(team, Sharded) else None,
                accumulates=not poisson_sampling,
                keeps_gradients=mode in ("hooks", "functorch", "ew"),
                on_first=None if unchecked else check_model_rows,
            )
            collector = BookKeepingModule(module, keeper) if wrap_model else BookKeepingHooks(module, keeper)
            if noise_generator is None and self._seeded_by is not None:
                noise_generator = own_generator(self._seeded_by)
            dp_optimizer = DPOptimizer(
                optimizer,
                spec=spec,
                clipping=clip,
                source=keeper,
                noise=SecureNoise() if self.secure_mode else TorchNoise(noise_generator),
                charge=self._charge,
                module=module,
                watch=ForwardWatch(keeper, keeper.on_first),
                draws=loader.draws if isinstance(loader, PoissonDataLoader) else None,
                prefetches=data_loader.num_workers > 0,
                together=team,
            )
            dp_optimizer.loss_checked, dp_optimizer.breaks_with_ignored = checked is not None, checked is False
            self._remember_dataset(data_loader.dataset, sampling.dataset_size)
            self._loader, self._last = loader, (collector if wrap_model else module, dp_optimizer)
            self._made.append(weakref.ref(dp_optimizer))
            self._noise.append(dp_optimizer.generator)
            start.note(
                module,
                dp_optimizer,
                data_loader.dataset,
                dataset_size=sampling.dataset_size,
                clipping=f"{clip.name} {clip.given}",
                augmentations=augmentations,
                user_ids="" if people is None else f"{people.terms} {people.digest}",
                accountant=self.accountant.mechanism(),
                secure_mode=self.secure_mode,
                charged=len(self.accountant),
            )
            if spec.unaccounted:
                text = f"{spec.unaccounted}: training runs but is not differentially private; get_epsilon will be inf."
                warnings.warn(text, PrivacyWarning, stacklevel=2)
            if mode == "ghost":
                return collector, dp_optimizer, criterion, loader
            return collector, dp_optimizer, loader

    def check(self, loss_fn: Callable[..., Any], batch: Any = None) -> None:
        """Refuse a loss in which one example changes the part of another. Made-up numbers are used, never data.

        >>> engine.check(nn.CrossEntropyLoss())  # after make_private
        >>> engine.check(lambda model, batch: my_loss(model(batch["x"]), batch["y"]))

        Rows together must have the per-example gradients that they have alone, in double precision.

        Args:
            loss_fn: a criterion, called as ``loss_fn(model(inputs), targets)`` on batches that are such pairs; or a function
                ``loss_fn(model, batch)`` that returns the loss of the batch, as your loop computes it.
            batch: a batch of which shapes and types are used, if the data loader's are not those that the loop sees.
        """
        optimizer = self._made[-1]() if self._made else None
        if optimizer is None:
            raise PrivacyError("check() before make_private: there is no private model yet. Call it after.")
        assert self._loader is not None
        batch = batch_structure(self._loader) if batch is None else batch
        optimizer.breaks_with_ignored = not try_loss(optimizer.source, loss_fn, batch)
        optimizer.loss_checked = True

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | Sequence[float],
        dataset_size: int | None = None,
        expected_batch_size: float | None = None,
        also: History | None = None,
        **options: Any,
    ) -> Any:
        """As :meth:`make_private`, with σ chosen so that ``epochs`` epochs, and ``also``, spend at most (ε, δ).

        ``also`` are releases that will be charged besides, as rows (σ, q, steps). The engine then refuses the step that would
        pass ε. Other arguments are those of :meth:`make_private`.
        """
        if "noise_multiplier" in options:
            raise bad(
                "noise_multiplier",
                options["noise_multiplier"],
                f"was given beside target_epsilon={target_epsilon!r}",
                "Use make_private with a noise_multiplier, or this with a target_epsilon",
            )
        if len(self.accountant) > self._inherited:
            raise PrivacyError(
                f"This engine has already charged {len(self.accountant)} releases, which target_epsilon={target_epsilon!r} "
                "does not cover. Use a new PrivacyEngine, or make_private with a noise_multiplier."
            )
        people = People.given(**options)
        public: dict[str, Any] = {"dataset_size": dataset_size, "expected_batch_size": expected_batch_size}
        sampling = declare(data_loader, **public, people=people)
        mechanism = options.get("mechanism", "gaussian")
        limit = planned(
            self.accountant, sampling, target_epsilon, target_delta, epochs=epochs, mechanism=mechanism, also=also
        )
        made = self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=limit.noise_multiplier,
            max_grad_norm=max_grad_norm,
            **{**options, **public, "user_ids": people},
        )
        self._limit = limit
        return made

    # ---- the account

    def get_epsilon(self, delta: float) -> float:
        """ε spent so far at δ. inf, with a warning, once anything was released without a guarantee."""
        n = self._dataset_size
        if n is not None and 0 < delta < 1 and delta >= 1 / n:
            warnings.warn(
                f"delta={delta!r}: is not smaller than 1/N = {1 / n:.3g}, so publishing one example outright would be allowed.",
                PrivacyWarning,
                stacklevel=2,
            )
        return self.accountant.get_epsilon(delta)

    def _group(self) -> Group | None:
        return current() if self._distributed else None

    def attach_ledger(self, path: str | os.PathLike[str]) -> Ledger | FollowedLedger:
        """Record every release in a file, synced before it is made; what the file holds already is charged to this engine.

        If it holds any release of its own, noise and batches are drawn from new seeds of the operating system, also where
        yours are fixed: the same noise must not meet two sums. :class:`dpivon.Checkpoints` goes on where a run was. In a
        process group the first rank has the file, and the others follow it.
        """
        if self.ledger is not None:
            raise bad("ledger", str(path), f"this engine has {self.ledger.path} already", "Use one engine a ledger")
        if len(self.accountant):
            problem = f"this engine has made {len(self.accountant)} releases that would not be in it"
            raise bad("ledger", str(path), problem, "Attach it before the first step")
        ledger = open_ledger(path, self._group())
        replay(ledger.record, 0, self.accountant)
        self.ledger, self._inherited = ledger, len(self.accountant)
        if ledger.record.releases > ledger.record.earlier:
            for made in self._made:
                if (optimizer := made()) is not None:
                    refresh(optimizer)
        return ledger

    def _charge(self, spec: NoiseSpec, evidence: str = "") -> None:
        """Charge one release, before it happens; refuse the one that would pass the budget. The disk first, then memory."""
        if spec.unit != self.accountant.unit:
            self.accountant.keep_unit(spec.unit)
        sigma, rate = spec.cost
        if self._limit is not None:
            if spec.unaccounted:
                raise PrivacyError(
                    f"target_epsilon={self._limit.epsilon!r}: a release with {spec.unaccounted} would spend ε = inf, so "
                    "nothing was released. Use make_private to train without a guarantee."
                )
            self._limit.check(self.accountant, sigma, rate)
        if self.ledger is not None:
            self.ledger.charge((spec.terms,), 1, evidence)
        if spec.unaccounted:
            self.accountant.record_unaccounted(spec.unaccounted)
        else:
            self.accountant.step(noise_multiplier=sigma, sample_rate=rate)

    def _remember_dataset(self, dataset: Any, size: int) -> None:
        text = "data_loader: a second dataset under one PrivacyEngine; its ε adds up over both as if they were one. Use a new "
        if self._dataset is not None and self._dataset is not dataset:
            warnings.warn(text + "engine for other data.", PrivacyWarning, stacklevel=3)
        self._dataset, self._dataset_size = dataset, size
