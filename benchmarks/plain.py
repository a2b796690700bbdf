"""Training without privacy, as fast as torch makes it: what a private step is measured against."""

from __future__ import annotations

import torch
from torch import nn


def plain_step(model, x, y, *, compiled=False, captured=False):
    """A function that makes one SGD step in bf16 on a fixed batch on the GPU."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    loss_fn = nn.CrossEntropyLoss()

    def loss():
        with torch.autocast("cuda", torch.bfloat16):
            return loss_fn(model(x), y)

    loss = torch.compile(loss) if compiled else loss

    def step():
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return capture(step) if captured else step


def capture(step):
    """The same step as a CUDA graph, with all that it reads and writes."""
    for _ in range(5):
        step()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay():
        graph.replay()

    replay.kept = step  # a graph knows addresses, and keeps nothing that is there
    return replay
