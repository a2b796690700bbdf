"""What the compiler is told; what it makes of it is tested in tests/gpu."""

from __future__ import annotations

import torch

from dpivon.privacy import precision


def test_the_compiler_knows_what_it_is_told():
    """An option that a version of torch lacks is refused when a program is compiled, which happens on a GPU only."""
    for again in (False, True):
        told = precision.options(again=again)
        assert told["emulate_precision_casts"] is True
        torch.compile(lambda x: x, options=told)


def test_what_is_computed_a_second_time_is_torchs_own_choice_unless_it_was_counted(monkeypatch):
    """A value that is measured from one computation and summed from another may be rounded twice. Only the program with
    kernels, whose layers are counted, is compiled for that."""
    told = []
    monkeypatch.setattr(torch, "compile", lambda function, **how: told.append(how["options"]) or function)
    precision.compiled(torch.add, torch.device("cuda"))
    precision.compiled(torch.add, torch.device("cuda"), again=True)
    assert [any("realize" in name for name in each) for each in told] == [False, True]


def test_on_a_cpu_a_function_stays_as_it_is():
    function = torch.add
    assert precision.compiled(function, torch.device("cpu")) is function
