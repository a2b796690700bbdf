"""What the kernels of an evaluation are given of a GPU's memory, by the rules of torch's allocator."""

from __future__ import annotations

import pytest

from dpivon.privacy.kernels.paper.layout import Layout

MIB = 2**20


def allocated(size):
    """Bytes that ``torch.cuda.memory_allocated`` counts for a buffer of 10 MiB or more on an empty GPU: memory comes from the
    driver in multiples of 2 MiB, and a rest of no more than 1 MiB is not split off."""
    size = -(-size // 512) * 512
    rest = -size % (2 * MIB)
    return size + (rest if rest <= MIB else 0)


def buffers(layout, passes):
    return [4 * passes * s * s * d // part for s, _, d in layout.convs for part in (1, 4)]


def test_the_rules_are_those_of_the_allocator():
    """Measured on an H200, where 7,489 passes were taken to fit into 2 GiB."""
    assert sum(map(allocated, buffers(Layout(), 7_489))) == 2_148_278_272


@pytest.mark.parametrize("memory", [2**31, 2**30, 2**31 + 12_345])
@pytest.mark.parametrize("layout", [Layout(), Layout(classes=8), Layout(widths=(16, 32, 64)), Layout(image=64)])
def test_what_is_allocated_stays_within_what_was_given(layout, memory):
    passes = layout.passes_at_once(memory)
    assert 0.98 * memory < sum(map(allocated, buffers(layout, passes))) <= memory
