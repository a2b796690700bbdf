"""The kernels of the paper's network in Triton's interpreter, on a CPU and in fp32.

`TRITON_INTERPRET=1 python forward_interpreted.py`. It is run by test_forward_kernels.py, in a process of its own because Triton
reads that variable when it is imported.
"""

from __future__ import annotations

import torch

from dpivon.privacy.kernels.paper.layout import Layout
from dpivon.privacy.kernels.paper.program import Program
from dpivon.privacy.kernels.reference import Batch, LoopedGradients
from dpivon.stacked import PaperNetwork

CPU = torch.device("cpu")
SMALL = Layout(image=16, widths=(16, 32), hidden=16, classes=8, groups=4)


def rows(network: PaperNetwork, count: int) -> torch.Tensor:
    theta = torch.stack([network.initial(k) for k in range(count)])
    return theta + 0.05 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(1))


def sums_are_those_of_the_loop(layout: Layout) -> None:
    """Forward, backward and sums of two runs."""
    network, generator = PaperNetwork(layout), torch.Generator().manual_seed(0)
    theta, bound = rows(network, 2), torch.tensor([0.5, 30.0])
    x, y = (
        torch.randn(6, 3, layout.image, layout.image, generator=generator),
        torch.randint(0, 8, (6,), generator=generator),
    )
    model, start = torch.tensor([0, 0, 0, 1, 1, 0], dtype=torch.int32), torch.tensor([0, 3, 5], dtype=torch.int32)
    places, seats = torch.tensor([[0, 1, 2], [3, 4, 6]]), torch.tensor([0, 1, 2, 3, 4, 0])
    program = Program(layout, 2, 6, CPU, torch.float32)
    got = program.clipped_sums(theta, Batch(program.prepare(x), y, model, start, places, seats), bound)
    expected = LoopedGradients(network, torch.float32).clipped_sums(
        theta, Batch(x, y, model, start, places, seats), bound
    )
    for a, b in zip(got, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-5
    print(f"ok sums of two runs, {layout.size} parameters", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sums_are_those_of_the_loop(SMALL)
    sums_are_those_of_the_loop(Layout())
