"""The recipe's width is the one that its tuning chose, by a rule that could have chosen another."""

from __future__ import annotations

import pytest
from experiments.strong_privacy.spread import choice, differences, on_the_test_set, scores

from dpivon.recipe import WIDTH


def made_up(*nll):
    """Widths 0, .1 and .25 at one cell: two seeds .01 either way, so that a difference has a standard error of .014."""
    return {
        width: {
            ("cifar10", "512", "1"): {
                "tempered_nll": [x - 0.01, x + 0.01],
                "tempered_ece": [0.0] * 2,
                "tempered_accuracy": [0.5] * 2,
            }
        }
        for width, x in zip((0.0, 0.1, 0.25), nll, strict=True)
    }


def test_the_default_is_what_held_out_images_chose():
    assert choice(scores())[0] == WIDTH


@pytest.mark.parametrize(
    ("nll", "width"),
    [((1.0, 1.013, 1.016), 0.1), ((1.0, 1.016, 1.013), 0.25), ((1.0, 1.02, 1.02), 0.0), ((1.1, 1.0, 1.1), 0.1)],
)
def test_the_widest_within_one_standard_error(nll, width):
    assert choice(made_up(*nll))[0] == width


def test_differences_are_of_one_cell_and_repetition():
    found = made_up(1.0, 1.25, 0.5)
    found[0.0]["cifar10", "512", "1"]["tempered_nll"] = [1.0, 2.0]
    assert differences(found, 0.1, "tempered_nll") == [[pytest.approx(0.24), pytest.approx(-0.74)]]
    assert on_the_test_set(found)[2].startswith("| 0.1 | -0.2500 [")
    assert "lower in 1 of 1" in on_the_test_set(found)[2]
