"""What the compiler is told; what it makes of it is tested in tests/gpu."""

from __future__ import annotations

import torch

from dpivon.privacy import compiling


def test_the_compiler_knows_what_it_is_told():
    """An option that a version of torch lacks is refused when a program is compiled, which happens on a GPU only."""
    assert compiling._OPTIONS["emulate_precision_casts"] is True
    torch.compile(lambda x: x, options=compiling._OPTIONS)


def test_on_a_cpu_a_function_stays_as_it_is():
    function = torch.add
    assert compiling.compiled(function, torch.device("cpu")) is function
