"""Bugs of views of an example: what is clipped as one."""

from __future__ import annotations

from typing import Any
from unittest import mock

from program_bugs import rows_as_examples
from sowing import Patch, attr, everywhere

from dpivon.privacy.gradients.bookkeeping import BookKeeper

_NO_VIEWS = {"distributed": "the audit gives ranks one view per example"}


def views_clipped_apart() -> dict[str, Patch | str]:
    """Every view is an example of its own: as many times C as there are views."""

    def one(original: Any) -> Any:
        def init(self: Any, *args: Any, **options: Any) -> None:
            original(self, *args, **{**options, "augmentations": 1})

        return init

    apart = attr(BookKeeper, "__init__", one)
    return everywhere(apart, apart, **_NO_VIEWS, compiled=rows_as_examples())


def views_added_up() -> dict[str, Patch | str]:
    """The sum over views, where the mean is meant."""

    def sums(original: Any) -> Any:
        def larger(self: Any, *args: Any) -> Any:
            with mock.patch.object(BookKeeper, "_share", property(lambda self: 1.0 / self.samples)):
                yield from original(self, *args)

        return larger

    added = attr(BookKeeper, "_sums_of_blocks", sums)
    return everywhere(added, added, **_NO_VIEWS)
