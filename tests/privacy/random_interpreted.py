"""The kernel of normals in Triton's interpreter, on a CPU: `TRITON_INTERPRET=1 python random_interpreted.py`."""

from __future__ import annotations

import torch

from dpivon.privacy.kernels.random import normal
from dpivon.privacy.streams import POSTERIOR, PRIVACY, Streams


def main() -> None:
    streams, step, p, block = Streams([5, 1234567890123], torch.device("cpu")), torch.tensor(7), 1001, 128
    for dtype, each, tolerance in ((torch.float32, 4, 1e-4), (torch.float64, 2, 1e-12)):
        for stream in (POSTERIOR, PRIVACY):
            out = torch.zeros(2, p, dtype=dtype)
            normal[(-(-p // (each * block)), 2)](out, streams._seed_rows, step, p, STREAM=stream, BLOCK=block)
            expected = streams.normal(torch.zeros(2, p, dtype=dtype), step, stream)
            torch.testing.assert_close(out, expected, rtol=0.0, atol=tolerance)
            print("ok", dtype, stream)


if __name__ == "__main__":
    main()
