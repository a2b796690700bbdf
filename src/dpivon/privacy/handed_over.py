"""What a caller hands over with a model: the name of a mode, losses to be tried on made-up numbers, a target ε."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from dpivon.errors import PrivacyError, bad, check_number, check_whole
from dpivon.privacy.accounting import Accountant, Limit
from dpivon.privacy.accounting import noise_multiplier as calibrate
from dpivon.privacy.accounting.history import History, check_history
from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.gradients.model_io import map_tensors
from dpivon.privacy.independence import check_loss_rows, check_model_rows
from dpivon.privacy.losses import PerExampleLoss
from dpivon.privacy.made_up import NotTried
from dpivon.privacy.mechanism import NoiseSpec, check_mechanism
from dpivon.privacy.sampling import Sampling

_MODES = ("bookkeeping", "hooks", "functorch", "ew", "ghost")


def check_mode(grad_sample_mode: str | None) -> str:
    """The name that was given, if it is known; all of them mean book-keeping."""
    if grad_sample_mode is None or grad_sample_mode == "bookkeeping":
        return "bookkeeping"
    if grad_sample_mode not in _MODES:
        known = ", ".join(map(repr, _MODES))
        raise bad("grad_sample_mode", grad_sample_mode, f"is not one of {known}", "Leave it out")
    _say_what_modes_mean()
    return grad_sample_mode


@functools.cache
def _say_what_modes_mean() -> None:
    warnings.warn(
        "grad_sample_mode: every name means book-keeping in dpivon, which has one way to compute clipped sums. Leave it out.",
        stacklevel=5,
    )


def try_loss(keeper: BookKeeper, loss_fn: Callable[..., Any], batch: Any) -> bool:
    """Refuse a loss in which examples touch each other; otherwise whether that holds for labels of -100 as well.

    Args:
        keeper: of the model.
        loss_fn: of (model, batch), or of outputs and targets where batches are pairs.
        batch: what a batch looks like.
    """
    device = next(keeper.module.parameters()).device
    batch = map_tensors(lambda t: t.to(device), batch)
    untried: NotTried | None = None
    for function in as_called(loss_fn, batch):
        try:
            return check_loss_rows(keeper, function, batch)
        except NotTried as error:
            untried = untried or error
    assert untried is not None
    raise untried


def try_criterion(
    criterion: Any, module: nn.Module, data_loader: DataLoader[Any], layout: dict[str, Any]
) -> bool | None:
    """As :func:`try_loss`, of a criterion that ``make_private`` was given; None if there is none or it cannot be tried."""
    if criterion is None:
        return None
    keeper = BookKeeper(module, **layout, on_first=check_model_rows)
    try:
        batch = batch_structure(data_loader)
        return try_loss(keeper, _of_pairs(criterion), batch) if _is_pair(batch) else None
    except NotTried:
        return None
    except PrivacyError as error:
        raise bad("criterion", criterion, f"is not a loss per example ({error})", "Use dpivon.PerExampleLoss") from None
    finally:
        keeper.detach_from_model()


def batch_structure(data_loader: DataLoader[Any]) -> Any:
    """A batch as the loader makes it, of which shapes and types are used."""
    record = data_loader.dataset[0]
    return data_loader.collate_fn([record, record])


def as_called(loss_fn: Any, batch: Any) -> list[Callable[[nn.Module, Any], Any]]:
    """The loss as a function of (model, batch), in the ways it may be meant: torch's losses take outputs and targets."""
    if _is_pair(batch) and (isinstance(loss_fn, nn.Module | PerExampleLoss) or hasattr(loss_fn, "reduction")):
        return [_of_pairs(loss_fn)]
    return [loss_fn, _of_pairs(loss_fn)] if _is_pair(batch) else [loss_fn]


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) == 2


def _of_pairs(criterion: Callable[..., Any]) -> Callable[[nn.Module, Any], Any]:
    return lambda model, batch: criterion(model(batch[0]), batch[1])


def planned(
    accountant: Accountant,
    sampling: Sampling,
    target_epsilon: float,
    target_delta: float,
    *,
    epochs: int,
    mechanism: Any,
    also: History | None = None,
) -> Limit:
    """The σ and the number of steps with which ``epochs`` epochs, and ``also``, spend at most (ε, δ), as a limit."""
    epochs = check_whole("epochs", epochs, "Use the number of passes you will train", at_least=1)
    target_epsilon = check_number("target_epsilon", target_epsilon, "Use a value such as 3.0", above=0.0)
    fix = "Use a probability well below 1/N"
    target_delta = check_number("target_delta", target_delta, fix, above=0.0, below=1.0)
    rate, steps = sampling.sample_rate, epochs * sampling.steps
    sigma = calibrate(
        target_epsilon=target_epsilon,
        delta=target_delta,
        sample_rate=rate,
        steps=steps,
        accountant=accountant.mechanism(),
        orders=accountant.orders,
        also=also,
    )
    mechanism = check_mechanism(mechanism)
    if NoiseSpec(sigma, 1.0, sampling.expected_batch_size, rate, mechanism=mechanism).cost != (sigma, rate):
        fix = "Use make_private with a noise_multiplier, and get_epsilon"
        raise bad("mechanism", mechanism.name, "is not charged as the Gaussian that σ is calibrated for", fix)
    beside = tuple(check_history(also or []))
    if any(row[:2] not in {(sigma, rate), *(own[:2] for own in beside)} for row in accountant.history):
        raise PrivacyError(
            f"The ledger holds {len(accountant)} releases of another plan, which target_epsilon={target_epsilon!r} "
            "does not cover. Give the arguments that the run was begun with, or begin another ledger."
        )
    return Limit(target_epsilon, target_delta, sigma, rate, steps, beside)
