"""A pytest plugin that runs Opacus's own tests against us.

``opacus.PrivacyEngine`` becomes ours, seeded by torch's global generator as Opacus's is (ours takes the operating system's
entropy unless it is told otherwise), and ``torch.optim.SGD`` a degenerate IVON that is exactly SGD: with N_ess = 1e30 the
posterior has no width, with β₂ = 1 its curvature stays at one, with β₁ = 0 there is no momentum.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import opacus
import opacus.privacy_engine
import torch

import dpivon

sys.path.insert(0, str(Path(__file__).parent))

import stub_torchvision

stub_torchvision.install()

# A few fixed examples by default, so that a run can be repeated; CONFORMANCE_EXAMPLES=50 looks at that many new ones.
examples = os.environ.get("CONFORMANCE_EXAMPLES")
hypothesis.settings.register_profile("conformance", max_examples=int(examples or 6), derandomize=examples is None)
hypothesis.settings.load_profile("conformance")


class DegenerateIVON(dpivon.IVON):
    def __init__(self, params, lr=1e-3, momentum=0, weight_decay=0):
        assert momentum == 0
        assert weight_decay == 0
        super().__init__(
            params, lr=lr, ess=1e30, hess_init=1.0, beta1=0.0, beta2=1.0, weight_decay=0.0, rescale_lr=False
        )


class SeededEngine(dpivon.PrivacyEngine):
    def __init__(self, *, secure_mode=False, **options):
        super().__init__(secure_mode=secure_mode, generator=None if secure_mode else torch.default_generator, **options)


opacus.PrivacyEngine = opacus.privacy_engine.PrivacyEngine = SeededEngine
torch.optim.SGD = DegenerateIVON


def pytest_addoption(parser):
    parser.addoption("--refused", default="", help="file of test ids that are refused on purpose, one a line")


def pytest_collection_modifyitems(config, items):
    path = config.getoption("--refused")
    refused = {line.split("#")[0].strip() for line in Path(path).read_text().splitlines()} - {""} if path else set()
    # not item.nodeid: what it says before '::' depends on where the environment lies relative to the checkout
    chosen = [item for item in items if "::".join([item.path.name, *item.nodeid.split("::")[1:]]) in refused]
    if chosen:
        config.hook.pytest_deselected(items=chosen)
        items[:] = [item for item in items if item not in chosen]
    for item in items:  # into the report, whose own names say the class alone
        item.user_properties.append(("module", item.module.__name__.removeprefix("opacus.tests.")))
