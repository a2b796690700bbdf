"""Tests run on one thread: small models gain nothing from more, and lose much on a busy machine.

And they can be repeated, alone or among others, in any order and by any number of processes: what the engine takes from the
operating system it takes here from torch's global generator, but in a test that is marked ``os_entropy``; and where the global
generators stand depends on the name of the test, or of the fixture that several tests share, and on nothing that ran before.
"""

from __future__ import annotations

import gc
import random
import zlib
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dpivon.privacy import noise

torch.set_num_threads(1)
gc.disable()  # until all is collected: nothing of what is imported becomes garbage, and looking for it takes seconds

_as_it_is = noise.os_generator
# At once, not in a fixture: those of whole modules come first.
noise.os_generator = lambda device="cpu": noise.own_generator(torch.default_generator, device)

#: Whole files that take long. They come first: no process is left with one of them when the others have nothing to do.
LONG = (
    "study/test_ray.py",
    "conformance/test_opacus_suite.py",
    "faults/test_faults.py",
    "audit/test_audit.py",
    "attack/test_matrix.py",
    "privacy/test_reference_twin.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but ``keep`` cases of a campaign slow, spread evenly over it, and put long files first."""
    campaigns: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("campaign") is not None:
            campaigns[item.nodeid.split("[")[0]].append(item)
    for cases in campaigns.values():
        mark = cases[0].get_closest_marker("campaign")
        keep = mark.kwargs["keep"] if mark is not None else 0
        kept = {place * len(cases) // keep for place in range(keep)}
        for place, item in enumerate(cases):
            if place not in kept:
                item.add_marker("slow")
    places = {f"tests/{name}": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.nodeid.split("::")[0], len(LONG)))


def pytest_collection_finish() -> None:
    """What was imported is not looked through again."""
    gc.freeze()
    gc.enable()


def _seed(name: str) -> None:
    number = zlib.crc32(name.encode())
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> Iterator[None]:
    """One that several tests share is made for whichever of them comes first."""
    if fixturedef.scope != "function":
        _seed(f"{fixturedef.argname} of {request.node.nodeid}")
    return (yield)


@pytest.fixture(autouse=True)
def _entropy_where_it_is_asked_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    _seed(request.node.nodeid)
    if request.node.get_closest_marker("os_entropy") is not None:
        monkeypatch.setattr(noise, "os_generator", _as_it_is)
