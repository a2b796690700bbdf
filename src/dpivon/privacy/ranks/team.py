"""What every group of ranks does at a release: agree, let the first rank charge, and only then have something to release.

The order is the guarantee's:

1. All ranks compare the digest of their ``NoiseSpec`` and where they are in the stream of batches. If anything differs,
   all of them stop: nothing was released.
2. Clipped sums are added up, in double, without noise.
3. The first rank decides what the sum is (after a resume it may be one that was made before), charges it on disk, and
   tells the others. They cannot go on without its word, so no rank has a release that is not charged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpivon.durable.tensors import bytes_of
from dpivon.errors import DpivonError, PrivacyError, bad
from dpivon.optim.ivon import IVON
from dpivon.optim.parameters import full_dtype
from dpivon.optim.rule_optimizer import RuleOptimizer
from dpivon.privacy import mechanism
from dpivon.privacy.layers.registry import by_name, plain_type
from dpivon.privacy.mechanism import DROP, Decision, NoiseSpec, OneProcess, charge_for, decide
from dpivon.privacy.noise import KNOWN_SEED, TorchNoise, expanded
from dpivon.privacy.ranks.group import Group, failure
from dpivon.release import LearnsFromReleases, Release
from dpivon.shards import is_sharded, part_of

if TYPE_CHECKING:
    from dpivon.privacy.optimizer import DPOptimizer

Sums = dict[Tensor, Tensor]
Charge = Callable[[NoiseSpec], None]


class Team(OneProcess):
    """Several processes that make one release."""

    def __init__(self, group: Group) -> None:
        self.group, self.rank, self.world = group, group.rank, group.world
        self.asked_to_stop = 0  # a signal that this rank got
        self.on_stop: Callable[[int], None] | None = None  # what all ranks do when any of them got one
        self._stop = 0
        self.releases = 0

    def share(self, generator: torch.Generator | None) -> None:
        """The first rank's whole state: a seed would be 32 secret bits."""
        if generator is not None:
            generator.set_state(self.group.broadcast(generator.get_state()))

    def release(self, optimizer: DPOptimizer, sums: Sums, spec: NoiseSpec) -> Release | None:
        self._agree(optimizer, spec)
        total = self._add_up(sums)
        if total is not None and self.group.first:
            made = self._lead(optimizer, total, spec)
        else:
            decision: Decision = tuple(self.group.check_first(self.group.broadcast_value()))
            charge = charge_for(optimizer, decision)
            made = None if charge is None else self._follow(optimizer, sums, spec, charge)
        self.releases += made is not None
        return made

    def _lead(self, optimizer: DPOptimizer, total: Sums, spec: NoiseSpec) -> Release | None:
        made: Release | None = None
        try:
            decision = decide(optimizer, total, spec)
            if decision[0] != DROP:
                charge = charge_for(optimizer, decision)
                assert charge is not None
                made = mechanism.release(total, spec, optimizer.noise, charge)
        except BaseException as error:
            self.group.broadcast_value(failure(error))
            raise
        self.group.broadcast_value(decision)
        if made is None:
            charge_for(optimizer, decision)  # after the word: new seeds are agreed on by all
            return None
        return self._hand_out(made)

    def _agree(self, optimizer: DPOptimizer, spec: NoiseSpec) -> None:
        """One spec and one draw for all ranks, or no release."""
        gathered = self.group.gather_numbers(
            [
                int(spec.digest[:15], 16),
                optimizer.batch_number,
                self.releases,
                self.asked_to_stop,
                *self._streams(optimizer),
            ]
        )
        self._stop = max(numbers[3] for numbers in gathered)
        names = ("noise_multiplier or max_grad_norm", "batch number", "number of releases")
        for rank, numbers in enumerate(gathered):
            for name, ours, theirs in zip(names, gathered[0], numbers, strict=False):
                if ours != theirs:
                    raise PrivacyError(
                        f"The {name} of rank {rank} is not that of rank 0, so nothing was released: their sums do not belong "
                        "to one release. Let every rank take the same steps, and change σ and C on all of them between two."
                    )
        for known in zip(*(numbers[4:] for numbers in gathered), strict=True):
            apart = [number for number in known if number]
            if len(set(apart)) < len(apart):
                raise PrivacyError(
                    "Two ranks would draw the same noise for their parts, so nothing was released: parts under one noise "
                    "subtract to the data. Leave optimizer.noise as make_private made it, or give every rank another seed."
                )

    def _streams(self, optimizer: DPOptimizer) -> list[int]:
        """What must differ between ranks; 0 where nothing is known of it."""
        return []

    def stepped(self, optimizer: DPOptimizer) -> None:
        if self._stop and self.on_stop is not None:
            self.on_stop(self._stop)

    # ---- where sums, noise and releases are: by default each rank has its own part of all of them

    def _add_up(self, sums: Sums) -> Sums | None:
        """The sums over all ranks, where the first rank will have them; None elsewhere."""
        return sums

    def _hand_out(self, made: Release) -> Release:
        """What the first rank sends to the others."""
        return made

    def _follow(self, optimizer: DPOptimizer, sums: Sums, spec: NoiseSpec, charge: Charge) -> Release:
        """Another rank's part of the release, after the first one's charge."""
        return mechanism.release(sums, spec, optimizer.noise, charge)


class Replicated(Team):
    """Data parallel: every rank has the whole model and a part of the batch. Sums go to the first rank, the release comes back.

    Only the first rank draws noise, so the others can release nothing but what they were sent. With one seed for all, a rank
    out of step would noise the same sum a second time under one charge; with a share of the noise from each, a missing share
    is too little noise. A reduction and a broadcast cost no more than an all-reduce.

    Every ``check_every`` releases the ranks compare a digest of parameters and optimizer state; 0 never.
    """

    def __init__(self, group: Group, check_every: int) -> None:
        super().__init__(group)
        self.check_every = check_every

    @torch.no_grad()
    def begin(self, module: nn.Module, optimizer: DPOptimizer) -> None:
        """Every rank starts from the first one's weights, batches and θ-samples."""
        for t in [*module.parameters(), *module.buffers()]:
            t.copy_(self.group.broadcast(t))
        self.share(optimizer.sampler_generator)
        inner: Any = optimizer.original_optimizer
        if hasattr(inner, "generator"):
            if inner.generator is None:  # the global one is each rank's own
                inner.generator = torch.Generator(optimizer.params[0].device)
                inner.generator.manual_seed(int(torch.randint(2**63 - 1, (1,))))
            self.share(inner.generator)
        self.check_replicas(optimizer)

    def stepped(self, optimizer: DPOptimizer) -> None:
        if self.check_every and self.releases % self.check_every == 0:
            self.check_replicas(optimizer)
        super().stepped(optimizer)

    def check_replicas(self, optimizer: DPOptimizer) -> None:
        """All ranks have the same posterior to the bit, or an error."""
        gathered = [n for (n,) in self.group.gather_numbers([state_digest(optimizer)])]
        for rank, digest in enumerate(gathered):
            if digest != gathered[0]:
                raise DpivonError(
                    f"After {self.releases} releases rank {rank} has other weights or another optimizer state than rank 0, "
                    "though both learned from the same releases. Write to the model on every rank alike, and run them on "
                    "machines and libraries of one kind; go on from the last checkpoint."
                )

    def _add_up(self, sums: Sums) -> Sums | None:
        total = self.group.reduce_to_first(torch.cat([t.flatten() for t in sums.values()]))
        return None if total is None else _split(total, sums)

    def _hand_out(self, made: Release) -> Release:
        self.group.broadcast(torch.cat([g.flatten() for g in made.gradients.values()]))
        return made

    def _follow(self, optimizer: DPOptimizer, sums: Sums, spec: NoiseSpec, charge: Charge) -> Release:
        charge(spec)
        room = torch.cat([t.new_empty(t.numel(), dtype=full_dtype(p)) for p, t in sums.items()])
        sent = _split(self.group.broadcast(room), sums)
        return mechanism.as_release({p: g.to(full_dtype(p)) for p, g in sent.items()}, spec)


def _split(flat: Tensor, like: Sums) -> dict[Tensor, Tensor]:
    parts = flat.split([t.numel() for t in like.values()])
    return {p: part.view(t.shape) for (p, t), part in zip(like.items(), parts, strict=True)}


def state_digest(optimizer: DPOptimizer) -> int:
    """Of all that the optimizer has learned."""
    total = hashlib.sha256()
    inner = optimizer.original_optimizer
    for group in inner.param_groups:
        for p in group["params"]:
            for value in (p, *(inner.state[p].values() if p in inner.state else ())):
                total.update(bytes_of(value) if isinstance(value, Tensor) else repr(value).encode())
    return int.from_bytes(total.digest()[:7], "little")


#: Layers whose rules read nothing of their weights but the shape.
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
LAYERS = (nn.Linear, nn.Embedding, *_NORMS)
NAMED_LAYERS = ("transformers.Conv1D",)  # of packages that need not be installed


def fsdp_modules(module: nn.Module) -> list[nn.Module]:
    """The parts of a model that ``fully_shard`` was applied to."""
    return [m for m in module.modules() if any(kind.__name__ == "FSDPModule" for kind in type(m).__mro__)]


class Sharded(Team):
    """Sharded data parallel (FSDP2): every rank holds a part of each parameter, of its sum, its noise and its posterior.

    In forward and backward a layer has its whole weight, and a rank all of its own examples, so per-example norms and clip
    factors are complete where they are computed. The clipped sum of a layer is added up over ranks in double the moment it is
    made, and a rank keeps its own part of it. Each coordinate has one owner, who adds its noise, from a stream of its own,
    after the first rank's charge.
    """

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

    def _streams(self, optimizer: DPOptimizer) -> list[int]:
        """The seed and the state that this rank's noise is drawn from; none of the operating system's generator."""
        generator = getattr(optimizer.noise, "generator", None)
        if generator is None:
            return [0, 0]
        seed = generator.initial_seed()
        found = [
            b"" if seed == KNOWN_SEED else str(seed).encode(),
            bytes_of(generator.get_state()),
        ]  # set states share one
        return [1 + int.from_bytes(hashlib.sha256(known).digest()[:7], "little") if known else 0 for known in found]

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
        if own and plain_type(layer) not in LAYERS and by_name(layer) not in NAMED_LAYERS:
            known = ", ".join([*(kind.__name__ for kind in LAYERS), *NAMED_LAYERS])
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
