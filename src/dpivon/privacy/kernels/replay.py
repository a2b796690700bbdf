"""A program of fixed tensors that a GPU replays without Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_WARM = 3


class Replay:
    """A function without arguments; on a GPU it is captured after three calls, which compile it and warm it up.

    The function reads and writes tensors that stay where they are. Once captured, its result is the same tensors every time,
    with new values. Draws from torch's default generator of the device, and from ``generators``, are new in every replay: each
    begins where the generator stands, and moves it on. One that never runs while ``beside`` does takes the same memory, if that
    was captured before; neither reads what the other left there.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        device: torch.device,
        beside: Replay | None = None,
        generators: Sequence[torch.Generator] = (),
    ) -> None:
        self._function, self._device, self._beside, self._generators = function, device, beside, generators
        self._calls = 0
        self._result: Any = None
        self.graph: Any = None

    def __call__(self) -> Any:
        if self.graph is not None:
            self.graph.replay()
            return self._result
        result = self._function()
        self._calls += 1
        if self._calls == _WARM:
            self.capture()
        return result

    def capture(self) -> None:
        """Record the function on a GPU; nothing of it is computed."""
        if self._device.type != "cuda":
            return
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        torch.cuda.synchronize()
        # A data loader's thread may pin memory meanwhile, which is no part of the capture.
        shared = None if self._beside is None or self._beside.graph is None else self._beside.graph.pool()
        with torch.cuda.graph(graph, pool=shared, capture_error_mode="thread_local"):
            self._result = self._function()
        self.graph = graph
