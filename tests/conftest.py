"""Tests run on one thread: small models gain nothing from more, and lose much on a busy machine.

And they can be repeated: what the engine takes from the operating system it takes here from torch's global generator, but
in a test that is marked ``os_entropy``.
"""

from __future__ import annotations

import pytest
import torch

from dpivon.privacy import noise

torch.set_num_threads(1)

_as_it_is = noise.os_generator
# At once, not in a fixture: those of whole modules come first.
noise.os_generator = lambda device="cpu": noise.own_generator(torch.default_generator, device)


@pytest.fixture(autouse=True)
def _entropy_where_it_is_asked_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("os_entropy") is not None:
        monkeypatch.setattr(noise, "os_generator", _as_it_is)
