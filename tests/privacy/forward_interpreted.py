"""The kernels of the paper's network in Triton's interpreter, on a CPU and in fp32.

`TRITON_INTERPRET=1 python forward_interpreted.py`. It is run by test_forward_kernels.py, in a process of its own because Triton
reads that variable when it is imported.
"""

from __future__ import annotations

import torch

from dpivon.privacy.kernels.paper.forward import Forward
from dpivon.privacy.kernels.paper.layout import Layout
from dpivon.privacy.kernels.paper.program import Program
from dpivon.privacy.kernels.reference import Batch, LoopedGradients
from dpivon.stacked import PaperNetwork

CPU = torch.device("cpu")
SMALL = Layout(image=16, widths=(16, 32), hidden=16, classes=8, groups=4)


def rows(network: PaperNetwork, count: int) -> torch.Tensor:
    theta = torch.stack([network.initial(k) for k in range(count)])
    return theta + 0.05 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(1))


def logits_are_those_of_the_model(layout: Layout, count: int, pictures: int, memory: int) -> None:
    """Several parts of pictures with an odd one left over; and a row of NaN among the others."""
    network = PaperNetwork(layout)
    theta, x = rows(network, count), torch.randn(pictures, 3, layout.image, layout.image)
    if count > 1:
        theta[1] = torch.nan
    forward = Forward(layout, CPU, memory=memory)
    got = forward.logits(theta, x)
    with torch.no_grad():
        expected = torch.stack([network.model(row)(x) for row in theta])
    assert got.shape == (count, pictures, layout.classes)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert torch.isfinite(got[0]).all()
    print(f"ok logits of {count} rows, {pictures} pictures, {forward.capacity} at once", flush=True)


def sums_are_those_of_the_loop() -> None:
    """Training's pass, which shares the blocks: forward, backward and sums of two runs."""
    network, generator = PaperNetwork(SMALL), torch.Generator().manual_seed(0)
    theta, bound = rows(network, 2), torch.tensor([0.5, 30.0])
    x, y = torch.randn(6, 3, 16, 16, generator=generator), torch.randint(0, 8, (6,), generator=generator)
    model, start = torch.tensor([0, 0, 0, 1, 1, 0], dtype=torch.int32), torch.tensor([0, 3, 5], dtype=torch.int32)
    places, seats = torch.tensor([[0, 1, 2], [3, 4, 6]]), torch.tensor([0, 1, 2, 3, 4, 0])
    program = Program(SMALL, 2, 6, CPU, torch.float32)
    got = program.clipped_sums(theta, Batch(program.prepare(x), y, model, start, places, seats), bound)
    expected = LoopedGradients(network, torch.float32).clipped_sums(
        theta, Batch(x, y, model, start, places, seats), bound
    )
    for a, b in zip(got, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-5
    print("ok sums of two runs", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logits_are_those_of_the_model(SMALL, count=3, pictures=47, memory=0)
    logits_are_those_of_the_model(SMALL, count=66, pictures=1, memory=0)  # more rows than go at once
    logits_are_those_of_the_model(Layout(), count=1, pictures=2, memory=0)
    sums_are_those_of_the_loop()
