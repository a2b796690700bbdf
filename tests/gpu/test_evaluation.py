"""Every fast way to make forward passes on a GPU, held to the eager one in probabilities. Skipped where there is no GPU.

Tolerances are those of TF32, to which both round convolutions: half the sum of differences is below 1e-3 in the mean, and no
probability is off by more than 2e-2.
"""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: run `pytest tests/gpu` on a machine with one", allow_module_level=True)

from dpivon.metrics import batch_ood_scores, batch_scores
from dpivon.models import MLP, CompactCNN, SmallCNN, WideResNet
from dpivon.privacy.kernels.paper.forward import MEMORY, Blocks, Forward
from dpivon.privacy.kernels.paper.layout import Layout
from dpivon.stacked import AnyNetwork, PaperNetwork
from dpivon.study.results.table import COVERAGES
from dpivon.study.run.predict import CompiledPasses, EagerPasses, KernelPasses, chosen, draw_rows, predict_row

DEVICE = torch.device("cuda")
MEAN, MOST = 1e-3, 2e-2
NETWORKS = {
    "compact": (CompactCNN, (3, 32, 32)),
    "wide": (lambda: WideResNet(depth=10, width=1), (3, 32, 32)),
    "small": (SmallCNN, (1, 8, 8)),
    "no images": (lambda: MLP(20, 5), (20,)),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*TensorFloat32")  # the compiler recommends it for products too


@pytest.fixture(autouse=True)
def as_in_a_study():
    """Without gradients, and with convolutions in torch's default precision, which other tests change."""
    before, torch.backends.cudnn.conv.fp32_precision = torch.backends.cudnn.conv.fp32_precision, "tf32"
    with torch.no_grad():
        yield
    torch.backends.cudnn.conv.fp32_precision = before
    torch.compiler.reset()


def rows_of(network, count, scale=3.0):
    """Rows that differ, and answer with some confidence: the last layer is scaled."""
    generator = torch.Generator("cuda").manual_seed(1)
    mean = network.initial(0).to(DEVICE)
    mean[-500:] *= scale
    return [mean + 0.02 * torch.randn(mean.shape, device=DEVICE, generator=generator) for _ in range(count)]


def images_of(n, shape=(3, 32, 32)):
    """Smooth and rough at once, so that networks have something to tell apart."""
    generator = torch.Generator("cuda").manual_seed(2)
    x = torch.randn(n, *shape, device=DEVICE, generator=generator)
    return x + 2 * torch.randn(n, *(shape[0], *(1 for _ in shape[1:])), device=DEVICE, generator=generator)


def check(way, network, rows, x):
    """Against the eager way, row by row; what is not finite there is not finite here, and nothing else is."""
    found = list(way.logits(rows, x))
    assert len(found) == len(rows)
    for got, logits in zip(found, EagerPasses(network, DEVICE).logits(rows, x), strict=True):
        assert got.shape == logits.shape
        p, q = got.double().softmax(-1), logits.double().softmax(-1)
        assert torch.equal(torch.isfinite(p), torch.isfinite(q))
        off = (p - q).nan_to_num().abs()
        assert float(off.sum(-1).mean()) / 2 < MEAN
        assert float(off.max()) < MOST


@pytest.mark.parametrize(
    ("count", "images", "classes"),
    [(1, 1, 10), (1, 20_011, 10), (2, 333, 8), (33, 997, 10), (33, 2000, 8), (70, 131, 10)],
)
def test_the_kernels_say_what_the_model_says(count, images, classes):
    """Odd numbers, more images and more rows than go through at once; and the second row is NaN."""
    network = PaperNetwork(Layout(classes=classes))
    rows = rows_of(network, count)
    if count > 1:
        rows[1] = torch.full_like(rows[1], torch.nan)
    check(KernelPasses(network.layout, DEVICE), network, rows, images_of(images))


def test_the_kernels_keep_to_their_memory():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    forward = Forward(Layout(), DEVICE)
    assert 0.9 * MEMORY < torch.cuda.memory_allocated() - before <= MEMORY
    assert forward.capacity > 5000


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_compiled_network_says_what_it_says_uncompiled(name, channels_last):
    """The last call is padded, all calls and all rows are one program; and the third row is NaN."""
    build, shape = NETWORKS[name]
    network = AnyNetwork(build)
    rows = rows_of(network, 5, scale=1.0)
    rows[2] = torch.full_like(rows[2], torch.nan)
    before = [row.clone() for row in rows]
    way = CompiledPasses(network, DEVICE, channels_last=channels_last, batch=256)
    torch._dynamo.utils.counters.clear()
    check(way, network, rows, images_of(701, shape))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert all(torch.equal(a, b) for a, b in zip(rows, before, strict=True) if torch.isfinite(b).all())


def test_the_fastest_way_is_taken_and_nobody_complains():
    said, x = [], images_of(3000)
    for network, kind in ((PaperNetwork(), KernelPasses), (AnyNetwork(CompactCNN), CompiledPasses)):
        assert isinstance(chosen(network, rows_of(network, 5), x, said.append), kind)
    assert said == []


def test_a_broken_kernel_costs_time_and_no_result(monkeypatch):
    """Every pass reads the image after its own. The kernels are left alone, and what is next in line is right."""
    features = Blocks.features

    def broken(self, w, inputs, model, image=None):
        return features(self, w, inputs, model, (image + 1) % len(inputs))

    monkeypatch.setattr(Blocks, "features", broken)
    network, said, x = PaperNetwork(), [], images_of(1500)
    rows = rows_of(network, 4)
    way = chosen(network, rows, x, said.append)
    assert isinstance(way, CompiledPasses)
    assert len(said) == 1
    assert said[0].startswith("evaluation: kernels is off by")
    check(way, network, rows, x)


def test_a_broken_compiler_costs_time_and_no_result(monkeypatch):
    run = CompiledPasses._load
    monkeypatch.setattr(CompiledPasses, "_load", lambda self, row: run(self, 0.9 * row))
    network, said = AnyNetwork(CompactCNN), []
    assert isinstance(chosen(network, rows_of(network, 3), images_of(500), said.append), EagerPasses)
    assert len(said) == 2  # channels last, and first


def test_scores_on_the_device_are_those_on_the_host():
    """Of 57 sets at once, one of them lost; and they are the same each time, to the bit."""
    generator = torch.Generator("cuda").manual_seed(5)
    probs = torch.randn(57, 2000, 10, device=DEVICE, generator=generator).softmax(-1)
    probs[3, 7] = torch.nan
    labels = torch.randint(0, 10, (57, 2000), device=DEVICE, generator=generator)
    found = batch_scores(probs, labels, coverages=COVERAGES)
    assert str(found) == str(batch_scores(probs, labels, coverages=COVERAGES))
    for ours, theirs in zip(found, batch_scores(probs.cpu(), labels.cpu(), coverages=COVERAGES), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12, nan_ok=True)
    a, b = probs[[0, 1, 3]].amax(-1), probs[[4, 5, 6]].amax(-1)[:, :777]
    for ours, theirs in zip(batch_ood_scores(a, b), batch_ood_scores(a.cpu(), b.cpu()), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("build", [PaperNetwork, lambda: AnyNetwork(CompactCNN)])
def test_a_run_is_scored_as_the_eager_way_scores_it(build):
    """Probabilities, mutual information and scores of several sets, bytes among them, with 32 draws."""
    network = build()
    (mean,) = rows_of(network, 1)
    std = torch.full_like(mean, 0.02)
    x, generator = images_of(2600), torch.Generator("cuda").manual_seed(3)
    grey = torch.randint(0, 256, (777, 3, 32, 32), dtype=torch.uint8, device=DEVICE, generator=generator)
    labels = torch.randint(0, 10, (2001,), device=DEVICE, generator=generator)
    sets, said = [x[:2001], grey, x[2001:]], []
    way = chosen(network, draw_rows(mean, std, samples=32, seed=0), x, said.append)
    assert said == []
    fast, plain = (predict_row(network, mean, std, sets, samples=32, seed=4, passes=p) for p in (way, None))
    for kind in ("mean", "average"):
        for a, b in zip(fast[kind], plain[kind], strict=True):
            assert float((a.probs - b.probs).abs().sum(-1).mean()) / 2 < MEAN
            assert float((a.probs - b.probs).abs().max()) < MOST
            if kind == "average":
                assert float((a.mutual_information - b.mutual_information).abs().mean()) < MEAN
                assert float(b.mutual_information.mean()) > 5 * MEAN
        ours, theirs = (batch_scores(found[kind][0].probs[None], labels)[0] for found in (fast, plain))
        for score, tolerance in (("accuracy", 2e-3), ("nll", 2e-3), ("ece", 2e-3), ("brier", 1e-3)):
            assert ours[score] == pytest.approx(theirs[score], abs=tolerance)
