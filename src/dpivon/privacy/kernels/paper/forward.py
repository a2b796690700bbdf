"""The paper's network forward, for many rows of parameters at once: training's blocks, and the logits of an evaluation.

In evaluation all rows see the same images, which are read where they lie: ``image[n]`` says which one pass n is of, as
``model[n]`` says whose weights it takes.

Evaluation stores fp32 and multiplies convolutions in TF32, as torch does on a GPU by default, so its scores can be held against
those that were made without kernels. bf16 would read half as much and keep seven bits in place of ten: more answers that are
close would turn. Three products in place of one (``tf32x3``) would be exact, and spill registers. Triton cuts off what cuDNN
rounds: the spread of the error is the same, and its mean is a common factor, which GroupNorm divides out. The head is as
torch's products are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpivon.privacy.kernels.paper import kernels
from dpivon.privacy.kernels.paper.layout import Layout

#: Block sizes and warps of each kernel by block of the network, tuned on an H200 in bf16.
TUNING: dict[str, list[dict[str, int]]] = {
    "forward": [{"BM": 256, "num_warps": 2}, {"BM": 128, "num_warps": 4}, {"BM": 64, "num_warps": 4}],
    # With two warps the first would need 238 registers, and Hopper's own products want four. By compiling; not yet measured.
    "forward_fp32": [{"BM": 256, "num_warps": 4}, {"BM": 128, "num_warps": 4}, {"BM": 64, "num_warps": 4}],
    "pool_forward": [{"BP": 64, "num_warps": 4}, {"BP": 16, "num_warps": 2}, {"BP": 4, "num_warps": 1}],
}
MEMORY = 2**31  # bytes of buffers in evaluation: enough passes to fill a GPU
ROWS = 64  # of parameters at once


class Blocks:
    """The convolutional blocks, with buffers made once so that a graph may capture them.

    ``keep`` leaves behind what backward reads: statistics, and which pixel won with its value.
    """

    def __init__(self, layout: Layout, capacity: int, device: torch.device, dtype: torch.dtype, *, keep: bool) -> None:
        self.layout, self.keep = layout, keep
        self.kernel = "forward_fp32" if dtype == torch.float32 else "forward"

        def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(capacity, *shape, device=device, dtype=dtype)

        self.z = [new(s * s, d) for s, _, d in layout.convs]
        self.y = [new(s * s // 4, d) for s, _, d in layout.convs]
        if keep:
            self.z_best = [new(s * s // 4, d) for s, _, d in layout.convs]
            self.which = [new(s * s // 4, d, dtype=torch.int8) for s, _, d in layout.convs]
            self.stats = [(new(d, dtype=torch.float32), new(d, dtype=torch.float32)) for *_, d in layout.convs]

    def features(self, w: dict[str, Tensor], inputs: Tensor, model: Tensor, image: Tensor | None = None) -> Tensor:
        """[passes, flat], one pass per entry of ``model``, of its own image or of the one that ``image`` names."""
        x, passes = inputs, len(model)
        for i, (s, c, d) in enumerate(self.layout.convs):
            options = tuned(TUNING[self.kernel][i], s * s)
            kernels.conv_forward[(passes * (s * s // options["BM"]),)](
                x, w[f"w{i}"], w[f"b{i}"], model, None if i else image, self.z[i], s, s, c, d,
                SIGN=1, HAS_BIAS=True, **options,
            )  # fmt: skip
            which, z_best, mean, rstd = (self.which[i], self.z_best[i], *self.stats[i]) if self.keep else (None,) * 4
            kernels.norm_pool_forward[(passes,)](
                self.z[i], w[f"gain{i}"], w[f"shift{i}"], model, self.y[i], which, z_best, mean, rstd,
                1e-5, s, s, d, d // self.layout.groups, KEEP=self.keep, **tuned(TUNING["pool_forward"][i], s * s // 4),
            )  # fmt: skip
            x = self.y[i]
        return x[:passes].view(passes, -1)


class Forward:
    """Logits of rows of parameters, [K, P], for images that all of them see."""

    def __init__(self, layout: Layout, device: torch.device, *, memory: int = MEMORY) -> None:
        self.layout, self.device = layout, device
        self.capacity = max(ROWS, layout.passes_at_once(memory))
        self.blocks = Blocks(layout, self.capacity, device, torch.float32, keep=False)

    def logits(self, theta: Tensor, images: Tensor) -> Tensor:
        """[K, N, classes] for images [N, 3, H, W]. A row that is not finite gives NaN, and the others are unaffected."""
        images = images.permute(0, 2, 3, 1).to(torch.float32).contiguous()
        return torch.cat([self._some(rows, images) for rows in theta.split(ROWS)])

    def _some(self, theta: Tensor, images: Tensor) -> Tensor:
        w, k = parameters(self.layout, theta, torch.float32), len(theta)
        out = theta.new_empty(k, len(images), self.layout.classes)
        done = 0
        for part in images.split(self.capacity // k):
            n = len(part)
            model = torch.arange(k, dtype=torch.int32, device=self.device).repeat_interleave(n)
            image = torch.arange(n, dtype=torch.int32, device=self.device).repeat(k)
            features = self.blocks.features(w, part, model, image)
            out[:, done : done + n] = head_logits(self.layout, w, features.view(k, n, -1))[1]
            done += n
        return out


def parameters(layout: Layout, theta: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights in the kernels' precision, each parameter's K copies together."""
    return {name: v.to(dtype).contiguous() for name, v in layout.views(theta).items()}


def head_logits(layout: Layout, w: dict[str, Tensor], a: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden layer and the logits of features [K, n, flat]."""
    n = len(layout.convs)
    h = torch.baddbmm(w[f"b{n}"].unsqueeze(1), a, w[f"w{n}"]).relu()
    return h, torch.baddbmm(w[f"b{n + 1}"].unsqueeze(1), h, w[f"w{n + 1}"])


def tuned(options: dict[str, int], positions: int) -> dict[str, int]:
    """A kernel's options, with its block no larger than the image."""
    return {key: min(v, positions) if key in ("BM", "BT", "BP") else v for key, v in options.items()}
