"""What the benchmark of compiling reads off a trace, and its roofline; what it compiles is in test_conv_kernels.py."""

from __future__ import annotations

import pytest
from benchmarks.compiling import BANDWIDTH, PRODUCTS, launches, roofline, seconds


def test_the_roofline_is_the_longer_of_the_two():
    assert seconds(BANDWIDTH, PRODUCTS / 2) == pytest.approx(1.0)
    assert seconds(BANDWIDTH / 2, PRODUCTS) == pytest.approx(1.0)


def test_the_layers_are_those_of_the_network(capsys):
    """Two encoder layers of four weights each, over 64 positions; norms and sums of them all, equal layers once."""
    found = launches("text", 8)
    assert len(found) == 8
    assert all(count == 2 and not standardised for count, *_, standardised, _ in found)
    widths = {(x.shape[1], g.shape[1]) for _, _, x, g, *_ in found}
    assert widths == {(128, 384), (128, 128), (128, 512), (512, 128)}
    assert all(x.shape[2:] == g.shape[2:] == (64, 1) for _, _, x, g, *_ in found)
    roofline("text", 8)
    said = capsys.readouterr().out.splitlines()
    rows = [line.split("|") for line in said if line.startswith("|")]
    examples = len(found[0][2])
    for row, (_, kind, x, g, *_, made) in zip(rows, found, strict=True):
        flops = 2 * 64 * examples * x.shape[1] * g.shape[1]
        moved = 2 * 64 * examples * (x.shape[1] + g.shape[1]) + 4 * made.numel()
        assert row[1].strip() == kind.removeprefix("conv_")
        assert float(row[4]) == pytest.approx(moved / 1e6, abs=0.05)
        assert float(row[5]) == pytest.approx(flops / 1e9, abs=0.005)
        assert float(row[6]) == pytest.approx(1e6 * max(moved / BANDWIDTH, flops / PRODUCTS), abs=0.05)
