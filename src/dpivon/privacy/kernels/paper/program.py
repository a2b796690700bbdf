"""Clipped sums of K copies of the paper's network in one pass over all their batches.

The examples of all runs lie one after the other, run by run (``start[k] : start[k+1]`` are run k's); rows after the last are
spare capacity that no sum reads. One forward, one backward for output gradients, per-example norms, one weighted
contraction: the book-keeping of :mod:`dpivon.privacy.gradients.bookkeeping`, in kernels made for this network, and
tested against it.

Operands may be bf16. Norms, clip factors, accumulators and sums are fp32, and an example's clip factor multiplies fp32
values only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpivon.errors import bad
from dpivon.privacy.clipping import EPS_NUM
from dpivon.privacy.kernels.paper import kernels
from dpivon.privacy.kernels.paper.layout import Layout
from dpivon.privacy.kernels.reference import Batch
from dpivon.privacy.precision import compiled, product

#: Block sizes, taps at a time and warps of each kernel by block of the network, tuned on an H200 in bf16. Norms and sums take
#: equally many positions at a time: where a gradient cancels over them, one order of adding gives one gradient.
TUNING: dict[str, list[dict[str, int]]] = {
    "forward": [{"BM": 256, "num_warps": 2}, {"BM": 128, "num_warps": 4}, {"BM": 64, "num_warps": 4}],
    # With two warps the first would need 238 registers, and Hopper's own products want four. By compiling; not yet measured.
    "forward_fp32": [{"BM": 256, "num_warps": 4}, {"BM": 128, "num_warps": 4}, {"BM": 64, "num_warps": 4}],
    "pool_forward": [{"BP": 64, "num_warps": 4}, {"BP": 16, "num_warps": 2}, {"BP": 4, "num_warps": 1}],
    "input": [{}, {"BM": 256, "num_warps": 4}, {"BM": 64, "num_warps": 4}],
    "norms": [
        {"BT": 128, "TAPS": 1, "num_warps": 2},
        {"BT": 128, "TAPS": 1, "num_warps": 2},
        {"BT": 64, "TAPS": 1, "num_warps": 4},
    ],
    "sums": [
        {"BT": 128, "TAPS": 1, "num_warps": 2},
        {"BT": 128, "TAPS": 3, "num_warps": 4},
        {"BT": 64, "TAPS": 3, "num_warps": 8},
    ],
    "pool_backward": [{"BP": 32, "num_warps": 1}, {"BP": 16, "num_warps": 1}, {"BP": 8, "num_warps": 1}],
}
_STAGES = 3  # rounds that Triton reads ahead by default


class Program:
    """The network's forward and backward for K runs, with buffers made once so that a graph may capture them."""

    def __init__(self, layout: Layout, runs: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        self.layout, self.runs, self.capacity, self.dtype = layout, runs, capacity, dtype
        self.device = device

        def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(*shape, device=device, dtype=dtype)

        n, f = capacity, torch.float32
        self.kernel = "forward_fp32" if dtype == torch.float32 else "forward"
        self.z = [new(n, s * s, d) for s, _, d in layout.convs]
        self.y = [new(n, s * s // 4, d) for s, _, d in layout.convs]
        # What backward reads: which pixel won with its value, and statistics.
        self.which = [new(n, s * s // 4, d, dtype=torch.int8) for s, _, d in layout.convs]
        self.z_best = [new(n, s * s // 4, d) for s, _, d in layout.convs]
        self.stats = [(new(n, d, dtype=f), new(n, d, dtype=f)) for *_, d in layout.convs]
        self.dz = [new(n, s * s, d) for s, _, d in layout.convs]
        self.dy = [new(n, s * s // 4, d) for s, _, d in layout.convs]
        self.small = [new(n, 3, d, dtype=f) for *_, d in layout.convs]  # γ, β, bias
        self.squared = new(2 * len(layout.convs), n, dtype=f)
        # Parts of a run's batch that are summed side by side: enough of them to fill the chip with few runs.
        self.chunks = max(16, min(128, 2048 // runs))
        self.partial = [new(runs, self.chunks, *_taps(c), d, dtype=f) for _, c, d in layout.convs]
        self.tiles = {kind: fitted(kind, layout, dtype, shared_memory(device)) for kind in ("norms", "sums")}
        self._weights, self._head = compiled(weights, device), compiled(head, device)
        self._factors, self._halves = compiled(clip_factors, device), compiled(halves, device)
        self._assemble = compiled(assemble, device)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Images [N, 3, H, W] as the kernels read them: channels last, in their precision."""
        return inputs.permute(0, 2, 3, 1).to(self.dtype).contiguous()

    def clipped_sums(self, theta: Tensor, batch: Batch, bound: Tensor) -> Tensor:
        """Σ_i ḡ_i for every run, [K, P] in fp64."""
        w = self._weights(self.layout, theta, self.dtype)
        linear, squared, dy = self._head(self.layout, w, self._features(w, batch), batch)
        self.dy[-1].view(self.capacity, -1).copy_(dy)
        self._backward(w, batch)
        factors, by_row = self._factors(squared, self.squared, batch.places, bound)
        self._conv_sums(batch, by_row)
        products, biases = [], []
        for a, g in linear:
            a, high, low, bias = self._halves(a, g, factors)
            products.append((product(a.mT, high), product(a.mT, low)))
            biases.append(bias)
        return self._assemble(self.partial, self.small, by_row, batch.places, products, biases)

    def _features(self, w: dict[str, Tensor], batch: Batch) -> Tensor:
        """The convolutional blocks forward: [examples, flat]."""
        x, n = batch.inputs, len(batch.model)
        for i, (s, c, d) in enumerate(self.layout.convs):
            options = tuned(TUNING[self.kernel][i], s * s)
            kernels.conv_forward[(n * (s * s // options["BM"]),)](
                x, w[f"w{i}"], w[f"b{i}"], batch.model, self.z[i], s, s, c, d, SIGN=1, HAS_BIAS=True, **options
            )
            kernels.norm_pool_forward[(n,)](
                self.z[i], w[f"gain{i}"], w[f"shift{i}"], batch.model, self.y[i], self.which[i], self.z_best[i],
                *self.stats[i], 1e-5, s, s, d, d // self.layout.groups, **tuned(TUNING["pool_forward"][i], s * s // 4),
            )  # fmt: skip
            x = self.y[i]
        return x[:n].view(n, -1)

    def _backward(self, w: dict[str, Tensor], batch: Batch) -> None:
        for i in reversed(range(len(self.layout.convs))):
            s, c, d = self.layout.convs[i]
            options = tuned(TUNING["pool_backward"][i], s * s // 4)
            kernels.norm_pool_backward[(self.capacity,)](
                self.z[i], self.dy[i], self.which[i], self.z_best[i], w[f"gain{i}"], batch.model, *self.stats[i], self.dz[i],
                self.small[i], self.squared[2 * i], s, s, d, d // self.layout.groups, **options,
            )  # fmt: skip
            x = self.y[i - 1] if i else batch.inputs
            kernels.weight_norms[(self.capacity,)](
                x, self.dz[i], self.squared[2 * i + 1], s, s, c, d, **self.tiles["norms"][i]
            )
            if i:
                options = tuned(TUNING["input"][i], s * s)
                tiles = s * s // options["BM"]
                kernels.conv_forward[(self.capacity * tiles,)](
                    self.dz[i], w[f"turned{i}"], w[f"b{i}"], batch.model, self.dy[i - 1], s, s, d, c,
                    SIGN=-1, HAS_BIAS=False, **options,
                )  # fmt: skip

    def _conv_sums(self, batch: Batch, by_row: Tensor) -> None:
        for i, (s, c, d) in enumerate(self.layout.convs):
            x = self.y[i - 1] if i else batch.inputs
            options = self.tiles["sums"][i]
            parts = 1 if c == 3 else 9 // options["TAPS"]
            kernels.weight_sums[(self.runs, parts, self.chunks)](
                x, self.dz[i], by_row, batch.start, self.partial[i], s, s, c, d, CHUNKS=self.chunks, **options
            )


# ---- what happens between the kernels, as pure functions that are compiled


def weights(layout: Layout, theta: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Each parameter's K copies together, in the kernels' precision; and the weights turned, for the input's gradient."""
    out = {name: v.to(dtype).contiguous() for name, v in layout.views(theta).items()}
    for i in range(1, len(layout.convs)):
        out[f"turned{i}"] = out[f"w{i}"].transpose(2, 3).contiguous()
    return out


def head(
    layout: Layout, w: dict[str, Tensor], features: Tensor, batch: Batch
) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """The two linear layers and the loss, run by run: their inputs and output gradients, the squared norms of their
    per-example gradients by place, and the gradient of the features by row."""
    n, rows = len(layout.convs), len(batch.labels)
    real = (batch.places < rows).unsqueeze(2)
    places = batch.places.clamp(max=rows - 1)
    a = torch.where(real, features[places], 0.0)
    labels = batch.labels[places]
    h = torch.baddbmm(w[f"b{n}"].unsqueeze(1), a, w[f"w{n}"]).relu()
    logits = torch.baddbmm(w[f"b{n + 1}"].unsqueeze(1), h, w[f"w{n + 1}"]).float()
    target = labels.unsqueeze(2) == torch.arange(layout.classes, device=labels.device)
    known = target.any(2, keepdim=True)  # a label that is no class: the example contributes zero
    g_out = torch.where(known, torch.softmax(logits, -1) - target.float(), 0.0).to(a.dtype)
    g_hidden = (g_out @ w[f"w{n + 1}"].mT) * (h > 0)
    squared = _linear_norm(a, g_hidden) + _linear_norm(h, g_out)
    dy = (g_hidden @ w[f"w{n}"].mT).flatten(0, 1)[batch.seats]
    return [(a, g_hidden), (h, g_out)], squared, dy


def clip_factors(linear: Tensor, convs: Tensor, places: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """min(1, C/‖g_i‖) by place, and by row with a zero after the last; zero for spare places and norms that are not finite."""
    rows = convs.shape[1]
    squared = linear + convs.sum(0)[places.clamp(max=rows - 1)]
    norms = squared.sqrt()
    factors = (bound.unsqueeze(1) / (norms + EPS_NUM)).clamp(max=1.0)
    factors = torch.where(torch.isfinite(norms) & (places < rows), factors, 0.0)
    return factors, factors.new_zeros(rows + 1).scatter(0, places.flatten(), factors.flatten())


def halves(a: Tensor, g: Tensor, factors: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A linear layer's inputs, its weighted output gradients in two parts that hold 16 bits of them, and their sum."""
    c = factors.unsqueeze(2)
    weighted = torch.where(c > 0, g.float() * c, 0.0)
    high = weighted.to(a.dtype)
    low = (weighted - high.float()).to(a.dtype)
    return torch.where(c > 0, a, 0.0), high, low, weighted.sum(1, dtype=torch.float64)


def assemble(
    partial: list[Tensor],
    small: list[Tensor],
    by_row: Tensor,
    places: Tensor,
    products: list[tuple[Tensor, Tensor]],
    biases: list[Tensor],
) -> Tensor:
    """All sums in the order of the layout, [K, P] in fp64."""
    factors = by_row[places].view(*places.shape, 1, 1)
    parts: list[Tensor] = []
    for chunks, each in zip(partial, small, strict=True):
        total = chunks.sum(1, dtype=torch.float64)
        parts.append(total[:, 0, :27].flatten(1) if total.shape[1] == 1 else total.flatten(1))
        rows = each[places.clamp(max=len(each) - 1)]  # [K, most, 3, d]
        gain, shift, bias = torch.where(factors > 0, rows * factors, 0.0).sum(1, dtype=torch.float64).unbind(1)
        parts += [bias, gain, shift]
    for (high, low), bias in zip(products, biases, strict=True):
        parts += [(high.double() + low.double()).flatten(1), bias]
    return torch.cat(parts, 1)


def tuned(options: dict[str, int], positions: int) -> dict[str, int]:
    """A kernel's options, with its block no larger than the image."""
    return {key: min(v, positions) if key in ("BM", "BT", "BP") else v for key, v in options.items()}


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; of a chip that does not say, the least that any with these kernels has."""
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 101_376))


def fitted(kind: str, layout: Layout, dtype: torch.dtype, room: int) -> list[dict[str, int]]:
    """The options of the norms' or sums' kernel by block: as tuned, or for a wider network one tap at a time and fewer stages.

    How many positions are taken at a time stays, so norms and sums still agree.
    """
    found = []
    for (s, c, d), own in zip(layout.convs, TUNING[kind], strict=False):
        options = tuned(own, s * s)
        ways = [(options["TAPS"], _STAGES), *((1, stages) for stages in (_STAGES, 2, 1))]
        each = {taps: dtype.itemsize * options["BT"] * (taps * max(c, 32) + d) for taps, _ in ways}
        fits = next(((taps, stages) for taps, stages in ways if stages * each[taps] <= room), None)
        if fits is None:
            fix = "Use narrower blocks, or AnyNetwork(network.build), which is traced"
            problem = f"{c} to {d} channels need more shared memory than the {room} bytes of this GPU"
            raise bad("widths", layout.widths, problem, fix)
        found.append(options | {"TAPS": fits[0], "num_stages": fits[1]})
    return found


def _taps(channels: int) -> tuple[int, int]:
    return (1, 32) if channels == 3 else (9, channels)


def _linear_norm(a: Tensor, g: Tensor) -> Tensor:
    """(‖a‖² + 1) ‖g‖²: weight and bias of a linear layer with one position an example."""
    return (a.float().square().sum(-1) + 1) * g.float().square().sum(-1)
