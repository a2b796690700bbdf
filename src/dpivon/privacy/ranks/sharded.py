"""Sharded data parallel (FSDP2): every rank holds a part of each parameter, of its sum, its noise and its posterior.

In forward and backward a layer has its whole weight, and a rank all of its own examples, so per-example norms and clip factors
are complete where they are computed. The clipped sum of a layer is added up over ranks in double the moment it is made, and
what a rank keeps of it is its own part. Each coordinate has one owner, who adds its noise, from a stream of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpivon.errors import bad
from dpivon.optim.ivon import IVON
from dpivon.optim.rule_optimizer import RuleOptimizer
from dpivon.privacy.layers.registry import plain_type
from dpivon.privacy.noise import TorchNoise, expanded
from dpivon.privacy.ranks.group import Group
from dpivon.privacy.ranks.team import Team
from dpivon.release import LearnsFromReleases
from dpivon.shards import is_sharded, part_of

if TYPE_CHECKING:
    from dpivon.privacy.optimizer import DPOptimizer

#: Layers whose rules read nothing of their weights but the shape.
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
LAYERS = (nn.Linear, nn.Embedding, *_NORMS)


def fsdp_modules(module: nn.Module) -> list[nn.Module]:
    """The parts of a model that ``fully_shard`` was applied to."""
    return [m for m in module.modules() if any(kind.__name__ == "FSDPModule" for kind in type(m).__mro__)]


class Sharded(Team):
    """Sums are scattered as they are made; every rank noises its part after the first rank's charge."""

    sharded = True

    def begin(self, module: nn.Module, optimizer: DPOptimizer) -> None:
        """Batches are shared; noise and θ-samples are each rank's own, for its own part."""
        for part in fsdp_modules(module):
            # Otherwise the outermost layers stay whole after a forward, and the next one would not see new weights.
            part.set_reshard_after_forward(True, recurse=False)  # type: ignore[operator]
        self.share(optimizer.sampler_generator)
        root = self.group.broadcast_value(_draw(optimizer.noise))
        if isinstance(optimizer.noise, TorchNoise):  # also one that came from the same seed on every rank
            optimizer.noise.branch(f"{root} noise {self.rank}".encode())
        inner: Any = optimizer.original_optimizer
        if hasattr(inner, "generator"):
            root = self.group.broadcast_value(_draw(inner))
            device = optimizer.params[0].device
            inner.generator = expanded(torch.Generator(device), f"{root} posterior {self.rank}".encode())

    def scatter(self, p: Tensor, total: Tensor) -> Tensor:
        """This rank's part of Σ over ranks of ``total``, the clipped sum of the whole parameter p."""
        rows = -(-total.shape[0] // self.world)  # of every rank but the last ones
        spare = rows * self.world - total.shape[0]
        padded = torch.cat([total, total.new_zeros(spare, *total.shape[1:])]) if spare else total
        mine = self.group.reduce_scatter(padded.unflatten(0, (self.world, rows)))
        here = min(rows, max(0, total.shape[0] - self.rank * rows))
        return mine[:here]

    def settle(self, module: nn.Module) -> None:
        """A forward or backward that was broken off may have left whole weights behind, which are not those to come."""
        for part in fsdp_modules(module):
            part.reshard()  # type: ignore[operator]

    def stepped(self, optimizer: DPOptimizer) -> None:
        self.settle(optimizer.module)
        super().stepped(optimizer)


def check_sharded(module: nn.Module, optimizer: Any, group: Group | None) -> None:
    """A sharded model for which all of the above is true."""
    if group is None:
        fix = "Initialise torch.distributed first, and leave distributed=True"
        raise bad("module", type(module).__name__, "is sharded by fully_shard but trains alone", fix)
    for name, layer in module.named_modules():
        own = [p for p in layer.parameters(recurse=False) if p.requires_grad]
        if own and plain_type(layer) not in LAYERS:
            known = ", ".join(kind.__name__ for kind in LAYERS)
            fix = f"Shard models of {known}, freeze the layer, or train it unsharded"
            raise bad(f"module.{name}", type(layer).__name__, "has no rule for sharded weights", fix)
    for name, p in module.named_parameters():
        if p.requires_grad:
            _check_layout(name, p, group)
    if (
        isinstance(optimizer, LearnsFromReleases)
        and not isinstance(optimizer, IVON)
        and type(optimizer) is not RuleOptimizer
    ):
        fix = "Use dpivon.IVON, RuleOptimizer or an optimizer of torch.optim, or train unsharded"  # rules go by coordinates
        raise bad("optimizer", type(optimizer).__name__, "does not know sharded parameters", fix)
    estimator: Any = getattr(getattr(optimizer, "rule", optimizer), "estimator", getattr(optimizer, "curvature", None))
    if not getattr(estimator, "elementwise", True):
        other = "gradsq-corrected" if isinstance(optimizer, IVON) else "averaged-fisher"
        problem = "pools over weights of which each rank has a part"
        raise bad("curvature", estimator.name, problem, f"Use {other!r}, or train unsharded")


def _check_layout(name: str, p: Any, group: Group) -> None:
    fix = "Call fully_shard(module) on the whole model, with a mesh of all ranks and its default placement"
    if not is_sharded(p):
        raise bad(f"module.{name}", tuple(p.shape), "is not sharded while other parameters are", fix)
    mesh = p.device_mesh
    in_order = mesh.ndim == 1 and mesh.mesh.tolist() == list(range(group.world))
    by_rows = in_order and p.placements[0].is_shard(0)
    if not by_rows or part_of(torch.empty(p.shape, device="meta"), p).shape != p.to_local().shape:
        raise bad(
            f"module.{name}", p.placements, f"is not split by rows over all {group.world} ranks in their order", fix
        )
    if p.to_local().device.type != mesh.device_type:
        raise bad(f"module.{name}", p.to_local().device, "is offloaded from the device it is used on", fix)


def _draw(source: Any) -> list[int]:
    """252 bits from the source's generator, or from the global one if it has none: where every rank's own stream begins."""
    generator = getattr(source, "generator", None)
    device = "cpu" if generator is None else generator.device
    drawn: list[int] = torch.randint(2**63 - 1, (4,), generator=generator, device=device).tolist()
    return drawn
