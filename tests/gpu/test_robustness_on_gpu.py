"""What a study looks at beyond its test set, on a GPU. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: run `pytest tests/gpu` on a machine with one", allow_module_level=True)

from experiments.posterior.run import averaged
from experiments.robustness.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from experiments.robustness.evaluate import Condition, robustness_rows

from dpivon.privacy.kernels.paper.layout import Layout
from dpivon.stacked import PaperNetwork, Run, Stack
from dpivon.study.run.evaluation import posterior_row, predict_row

RANDOM = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "fog", "elastic_transform"),
    *("glass_blur", "motion_blur", "snow", "synthetic_frost"),
)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruptions_are_those_of_the_cpu(name):
    """To rounding where nothing is drawn; where something is, as far from the clean image."""
    coarse = torch.rand(400, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    x = torch.nn.functional.interpolate(coarse, (32, 32), mode="bilinear", align_corners=False)
    for severity in SEVERITIES:
        there, here = corrupt(x.cuda(), name, severity), corrupt(x, name, severity)
        assert there.device.type == "cuda"
        assert torch.equal(there, corrupt(x.cuda(), name, severity))
        if name in RANDOM:
            far = [float((y.cpu().float() / 255 - x).square().mean().sqrt()) for y in (there, here)]
            assert far[0] == pytest.approx(far[1], rel=0.05)
        else:
            assert int((there.cpu().int() - here.int()).abs().max()) <= 1  # convolutions may round to TF32


def test_eight_classes_in_the_kernels_and_beyond():
    """The paper's network with eight outputs trains in its kernels, and a stack is evaluated like each run alone."""
    generator = torch.Generator("cuda").manual_seed(0)
    labels = torch.randint(0, 8, (2000,), generator=generator, device="cuda")
    images = torch.randn(2000, 3, 32, 32, generator=generator, device="cuda") + labels.view(-1, 1, 1, 1) / 4
    foreign = torch.randint(0, 256, (300, 3, 32, 32), generator=generator, device="cuda", dtype=torch.uint8)
    made = [Condition("clean", "clean", 0, images[:500], labels[:500]), Condition("ood", "noise", 0, foreign, None)]
    runs = [Run("dp-ivon-gradsq", 1, 0.5, 1.0, 1.0, 256), Run("dp-adam", 2, 0.5, 1.0, 0.001, 256)]

    def rows(chosen):
        stack = Stack(chosen, PaperNetwork(Layout(classes=8)), images, labels, dtype=torch.bfloat16)
        for _ in stack.train(100):
            pass
        sets = [condition.images for condition in made]
        found = [
            predict_row(stack.network, *posterior_row(stack, i), sets, samples=4, seed=0) for i in range(len(chosen))
        ]
        return [robustness_rows(str(i), each, made, selective=True) for i, each in enumerate(found)]

    together = rows(runs)
    assert [len(r) for r in together] == [4, 2]
    for run, found in zip(runs, together, strict=True):
        (alone,) = rows([run])
        assert found[0]["accuracy"] > 0.3  # one in eight by chance
        assert found[0]["accuracy"] == pytest.approx(alone[0]["accuracy"], abs=0.1)
        assert found[-1]["auroc_entropy"] == pytest.approx(alone[-1]["auroc_entropy"], abs=0.25)


def test_compiled_passes_are_those_of_the_model():
    """The predictors of a run go through a compiled body; torch's own modules are its reference."""
    network, g = PaperNetwork(), torch.Generator("cuda").manual_seed(0)
    first = network.initial(0).cuda()
    rows = [first + 0.02 * torch.randn(first.shape, generator=g, device="cuda") for _ in range(3)]
    images = torch.randn(10_000, 3, 32, 32, generator=g, device="cuda")
    logs, _ = averaged(network, rows, images)
    with torch.no_grad():
        model = network.model(rows[0]).eval()
        each = [torch.cat([network.load(row, model)(x).softmax(-1) for x in images.split(5000)]) for row in rows]
    assert float((logs.exp() - torch.stack(each).mean(0)).abs().max()) < 2e-3  # TF32
