"""The network inside what people wrap around it for data-parallel training."""

from __future__ import annotations

from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import nn

from dpivon.errors import bad


def unwrap_parallel(module: nn.Module, wrap_model: bool) -> nn.Module:
    """The network in ``DistributedDataParallel`` or Opacus's counterpart of it, which need not be there.

    Their own work (averaging gradients, handing out the first weights) is not used: gradients are raw, and both are
    done at the boundary. The wrapper's hooks stay silent, since its ``forward`` is never called.
    """
    if isinstance(module, nn.parallel.DistributedDataParallel | DifferentiallyPrivateDistributedDataParallel):
        if not wrap_model:  # then the caller would go on calling the wrapper
            fix = "Pass module.module and call that, or leave wrap_model=True"
            raise bad("wrap_model", False, f"{type(module).__name__} would average raw gradients itself", fix)
        inner: nn.Module = module.module
        return inner
    if isinstance(module, nn.DataParallel):
        fix = "Start one process a device with torchrun, and pass the plain module"
        raise bad("module", type(module).__name__, "runs several devices in one process", fix)
    if type(module).__name__ == "FullyShardedDataParallel":
        fix = "Use torch.distributed.fsdp.fully_shard (FSDP2)"
        raise bad("module", type(module).__name__, "flattens parameters, so that layers cannot be told apart", fix)
    return module


def fsdp_modules(module: nn.Module) -> list[nn.Module]:
    """The parts of a model that ``fully_shard`` was applied to."""
    return [m for m in module.modules() if any(kind.__name__ == "FSDPModule" for kind in type(m).__mro__)]
