"""What the caller goes on using as the model, in mode ``"bookkeeping"``: wrapped, or with hooks only."""

from __future__ import annotations

from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from torch import nn

from dpivon.privacy.gradients.bookkeeping import BookKeeper
from dpivon.privacy.gradients.collect import EmptyBatchInForward, EmptyBatchInHooks


class BookKeepingModule(EmptyBatchInForward, AbstractGradSampleModule):  # type: ignore[misc]
    """Mode ``"bookkeeping"``: the model, watched."""

    def __init__(self, m: nn.Module, keeper: BookKeeper) -> None:
        super().__init__(m, batch_first=keeper.batch_first, loss_reduction=keeper.loss_reduction)
        self.keeper = keeper

    def remove_hooks(self) -> None:
        self.keeper.detach_from_model()


class BookKeepingHooks(EmptyBatchInHooks):
    """Mode ``"bookkeeping"`` on a model that is not to be wrapped."""

    def __init__(self, m: nn.Module, keeper: BookKeeper) -> None:
        self._module, self.batch_first, self.keeper = m, keeper.batch_first, keeper
        self.attach(m)

    def forbid_grad_accumulation(self) -> None:
        pass

    def cleanup(self) -> None:
        self.keeper.detach_from_model()
