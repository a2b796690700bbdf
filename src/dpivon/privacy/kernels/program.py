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
import torch.nn.functional as F
from torch import Tensor

from dpivon.privacy.clipping import EPS_NUM
from dpivon.privacy.kernels import conv as conv_kernels
from dpivon.privacy.kernels import norm_pool as norm_kernels
from dpivon.privacy.kernels.batch import Batch
from dpivon.privacy.kernels.layout import Layout
from dpivon.privacy.precision import weighted_product

#: (block size, warps) of each kernel by block of the network, tuned on an H200.
TUNING: dict[str, list[dict[str, int]]] = {
    "forward": [{"BM": 256, "num_warps": 2}, {"BM": 128, "num_warps": 4}, {"BM": 64, "num_warps": 4}],
    "input": [{}, {"BM": 256, "num_warps": 4}, {"BM": 64, "num_warps": 4}],
    "norms": [{"BT": 128, "num_warps": 2}, {"BT": 256, "num_warps": 2}, {"BT": 64, "num_warps": 4}],
    "sums": [{"BT": 128, "num_warps": 2}, {"BT": 256, "num_warps": 2}, {"BT": 64, "num_warps": 4}],
    "pool_forward": [{"BP": 128, "num_warps": 2}, {"BP": 64, "num_warps": 2}, {"BP": 16, "num_warps": 2}],
    "pool_backward": [{"BP": 16, "num_warps": 4}, {"BP": 32, "num_warps": 2}, {"BP": 16, "num_warps": 2}],
}


class Program:
    """The network's forward and backward for K runs, with buffers made once so that a graph may capture them."""

    def __init__(self, layout: Layout, runs: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        self.layout, self.runs, self.capacity, self.dtype = layout, runs, capacity, dtype
        self.device = device

        def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(*shape, device=device, dtype=dtype)

        n, f = capacity, torch.float32
        self.z = [new(n, s * s, d) for s, _, d in layout.convs]
        self.dz = [new(n, s * s, d) for s, _, d in layout.convs]
        self.y = [new(n, s * s // 4, d) for s, _, d in layout.convs]
        self.dy = [new(n, s * s // 4, d) for s, _, d in layout.convs]
        self.stats = [(new(n, d, dtype=f), new(n, d, dtype=f)) for *_, d in layout.convs]
        self.small = [tuple(new(n, d, dtype=f) for _ in range(3)) for *_, d in layout.convs]  # γ, β, bias
        self.squared = new(2 * len(layout.convs), n, dtype=f)
        # Parts of a run's batch that are summed side by side: enough of them to fill the chip with few runs.
        self.chunks = max(16, min(128, 2048 // runs))
        self.partial = [new(runs, self.chunks, *_taps(c), d, dtype=f) for _, c, d in layout.convs]

    # ---- forward

    def features(self, w: dict[str, Tensor], batch: Batch) -> Tensor:
        """The convolutional blocks: [capacity, flat]."""
        x = batch.inputs
        for i, (s, c, d) in enumerate(self.layout.convs):
            options = _tuned("forward", i, s * s)
            tiles = s * s // options["BM"]
            conv_kernels.conv_forward[(self.capacity * tiles,)](
                x, w[f"w{i}"], w[f"b{i}"], batch.model, self.z[i], s, s, c, d, SIGN=1, HAS_BIAS=True, **options
            )
            mean, rstd = self.stats[i]
            norm_kernels.norm_pool_forward[(self.capacity,)](
                self.z[i], w[f"gain{i}"], w[f"shift{i}"], batch.model, self.y[i], mean, rstd, 1e-5,
                s, s, d, d // self.layout.groups, **_tuned("pool_forward", i, s * s // 4),
            )  # fmt: skip
            x = self.y[i]
        return x.view(self.capacity, -1)

    # ---- clipped sums

    def prepare(self, inputs: Tensor) -> Tensor:
        """Images [N, 3, H, W] as the kernels read them: channels last, in their precision."""
        return inputs.permute(0, 2, 3, 1).to(self.dtype).contiguous()

    def clipped_sums(self, theta: Tensor, batch: Batch, bound: Tensor) -> Tensor:
        """Σ_i ḡ_i for every run, [K, P] in fp64."""
        layout, n = self.layout, len(self.layout.convs)
        w = self._low(theta)
        a = _take(self.features(w, batch), batch.places)
        h = F.relu(torch.baddbmm(w[f"b{n}"].unsqueeze(1), a, w[f"w{n}"]))
        logits = torch.baddbmm(w[f"b{n + 1}"].unsqueeze(1), h, w[f"w{n + 1}"]).float()
        real = batch.places < self.capacity
        labels = _take(batch.labels.unsqueeze(1), batch.places).squeeze(2)
        g_out = (torch.softmax(logits, -1) - F.one_hot(labels, layout.classes)).to(self.dtype)
        g_hidden = (g_out @ w[f"w{n + 1}"].mT) * (h > 0)
        squared = _linear_norm(a, g_hidden) + _linear_norm(h, g_out)
        torch.index_select(
            (g_hidden @ w[f"w{n}"].mT).flatten(0, 1), 0, batch.seats, out=self.dy[-1].view(self.capacity, -1)
        )
        self._backward(w, batch)
        squared = squared + _take(self.squared.sum(0).unsqueeze(1), batch.places).squeeze(2)
        norms = squared.sqrt()
        factors = (bound.unsqueeze(1) / (norms + EPS_NUM)).clamp(max=1.0)
        factors = torch.where(torch.isfinite(norms) & real, factors, 0.0)
        sums = torch.empty(theta.shape, dtype=torch.float64, device=theta.device)
        out = layout.views(sums)
        self._conv_sums(out, batch, factors)
        for i, (x, g) in ((n, (a, g_hidden)), (n + 1, (h, g_out))):
            x, g = (torch.where(factors.unsqueeze(2) > 0, t, 0.0) for t in (x, g))
            weighted = g.float() * factors.unsqueeze(2)
            out[f"w{i}"].copy_(weighted_product(x, weighted, parts=2))
            out[f"b{i}"].copy_(weighted.sum(1, dtype=torch.float64))
        return sums

    def _backward(self, w: dict[str, Tensor], batch: Batch) -> None:
        for i in reversed(range(len(self.layout.convs))):
            s, c, d = self.layout.convs[i]
            mean, rstd = self.stats[i]
            norm_kernels.norm_pool_backward[(self.capacity,)](
                self.z[i], self.dy[i], w[f"gain{i}"], w[f"shift{i}"], batch.model, mean, rstd, self.dz[i],
                *self.small[i], self.squared[2 * i], s, s, d, d // self.layout.groups, **_tuned("pool_backward", i, s * s // 4),
            )  # fmt: skip
            x = self.y[i - 1] if i else batch.inputs
            conv_kernels.weight_norms[(self.capacity,)](
                x, self.dz[i], self.squared[2 * i + 1], s, s, c, d, TAPS=1 if c == 3 else 9, **_tuned("norms", i, s * s)
            )
            if i:
                options = _tuned("input", i, s * s)
                turned = w[f"w{i}"].transpose(2, 3).contiguous()
                tiles = s * s // options["BM"]
                conv_kernels.conv_forward[(self.capacity * tiles,)](
                    self.dz[i], turned, turned, batch.model, self.dy[i - 1], s, s, d, c,
                    SIGN=-1, HAS_BIAS=False, **options,
                )  # fmt: skip

    def _conv_sums(self, out: dict[str, Tensor], batch: Batch, factors: Tensor) -> None:
        by_row = torch.zeros(self.capacity + 1, device=factors.device)
        by_row.scatter_(0, batch.places.flatten(), factors.flatten())
        for i, (s, c, d) in enumerate(self.layout.convs):
            x = self.y[i - 1] if i else batch.inputs
            taps = 1 if c == 3 else 9
            conv_kernels.weight_sums[(self.runs, taps, self.chunks)](
                x, self.dz[i], by_row, batch.start, self.partial[i], s, s, c, d,
                TAPS=taps, CHUNKS=self.chunks, **_tuned("sums", i, s * s),
            )  # fmt: skip
            total = self.partial[i].sum(1, dtype=torch.float64)
            out[f"w{i}"].copy_(total[:, 0, :27].reshape(-1, 9, 3, d) if c == 3 else total)
            for name, g in zip(("gain", "shift", "b"), self.small[i], strict=True):
                g = torch.where(factors.unsqueeze(2) > 0, _take(g, batch.places), 0.0)
                out[f"{name}{i}"].copy_((g * factors.unsqueeze(2)).sum(1, dtype=torch.float64))

    def _low(self, theta: Tensor) -> dict[str, Tensor]:
        """The weights in the kernels' precision, each parameter's K copies together."""
        return {name: v.contiguous() for name, v in self.layout.views(theta.to(self.dtype)).items()}


def _tuned(kernel: str, block: int, positions: int) -> dict[str, int]:
    """The tuning of a kernel, with its block no larger than the image."""
    return {key: v if key == "num_warps" else min(v, positions) for key, v in TUNING[kernel][block].items()}


def _taps(channels: int) -> tuple[int, int]:
    return (1, 32) if channels == 3 else (9, channels)


def _take(rows: Tensor, places: Tensor) -> Tensor:
    """rows[places], with zeros for spare places."""
    inside = places < len(rows)
    taken = rows[places.clamp(max=len(rows) - 1)]
    return torch.where(
        inside.view(*places.shape, *[1] * (rows.dim() - 1)),
        taken,
        torch.zeros((), dtype=rows.dtype, device=rows.device),
    )


def _linear_norm(a: Tensor, g: Tensor) -> Tensor:
    """(‖a‖² + 1) ‖g‖²: weight and bias of a linear layer with one position an example."""
    return (a.float().square().sum(-1) + 1) * g.float().square().sum(-1)
