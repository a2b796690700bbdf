"""The library refuses each careless program, or runs it right, and with the bug sown for it does not."""

from __future__ import annotations

import pytest
from careless_programs import Program, Remembering, Scaled, Two, Written
from check_bugs import CheckBug, check_bugs

BUGS = check_bugs()


@pytest.mark.campaign(keep=5)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_of_a_check_is_shown(bug: CheckBug) -> None:
    assert bug.program.outcome() == bug.sound
    assert bug.shown() != bug.sound
    assert bug.program.outcome() == bug.sound  # a bug must not outlive its block


def test_a_model_whose_expanded_parameters_cannot_run_alone_is_refused() -> None:
    (bug,) = [b for b in BUGS if b.name == "no way back from expanded parameters"]
    assert bug.shown() == "refused"


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(Two, id="two layers"),
        pytest.param(Scaled, id="expanded, on the model itself"),
        pytest.param(lambda: Remembering(10**9), id="a counter in an attribute"),
    ],
)
def test_a_program_that_is_right_is_let_through_from_the_first_step_on(build) -> None:
    """The check on made-up inputs runs inside the first forward, which it must leave as if it had not."""
    assert [Program(build, steps=n).outcome() for n in (1, 3)] == ["right", "right"]


def test_what_a_program_shows_is_measured() -> None:
    assert Program(Written, unchecked=True, neighbours=False).outcome() == "refused"
    shown = {b.name: b.shown() for b in BUGS}
    assert shown["rows of a layer not counted"].startswith("one example moves the sum by 6.")
    assert sum("C" in text for text in shown.values()) >= 8
    assert sum("keeps" in text for text in shown.values()) == 4
