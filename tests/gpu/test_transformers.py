"""Every stock model of transformers in bf16 on a GPU: one example moves the clipped sum by at most C."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("transformers")
pytest.importorskip("peft")
sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
import transformers as hf
from transformer_models import MODELS, check_captured_neighbours, check_neighbours, check_recorded_bounds

from dpivon.privacy.kernels import conv_ops
from dpivon.privacy.layers import bounded, norm, unsummed
from dpivon.privacy.layers.bounded import Bounded
from dpivon.privacy.precision import surroundings

pytestmark = pytest.mark.filterwarnings("ignore")
FIRST = list(dict(reversed(MODELS)).items())[::-1]  # the first task of every model


@pytest.mark.parametrize(("name", "task"), FIRST)
@pytest.mark.parametrize("tuning", ["all", "LoRA"])
def test_one_example_moves_the_sum_by_at_most_C(name, task, tuning, monkeypatch):
    check_neighbours(name, task, tuning, "cuda", monkeypatch)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_one_example_moves_a_captured_sum_by_at_most_C(name, monkeypatch):
    check_captured_neighbours(name, "cuda", monkeypatch)


@pytest.mark.parametrize("like", ["random", "alike"])
def test_one_example_moves_a_captured_sum_by_at_most_C_at_full_width(like, monkeypatch):
    """Of large weights and a head, whose norms are bounded; and of examples whose gradients are nearly one."""
    torch.manual_seed(0)
    config = hf.GPT2Config(n_layer=1, use_cache=False, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    tokens = torch.randint(50257, (16, 128), device="cuda")
    if like == "alike":
        tokens[:, :-2] = tokens[0, :-2]
    check_recorded_bounds(hf.GPT2LMHeadModel(config).cuda().train(), tokens, tokens, monkeypatch)


@pytest.mark.parametrize(
    ("t", "d", "p"), [(16, 768, 3072), (128, 768, 2307), (128, 3072, 768), (197, 768, 3072), (700, 64, 96)]
)
@pytest.mark.parametrize("like", ["ordinary", "cancelling", "aligned"])
def test_bounds_hold_on_tensor_cores(like, t, d, p):
    torch.manual_seed(0)
    a, g = torch.randn(1, t, d) + 0.05 * torch.randn(64, t, d), torch.randn(1, t, p) + 0.05 * torch.randn(64, t, p)
    if like == "cancelling":
        half = t // 2
        a[:, half : 2 * half], g[:, half : 2 * half] = a[:, :half], -g[:, :half]
        g[:, 0] *= 1.01
    elif like == "aligned":
        a, g = a.abs() + 1.0, g.abs() + 1.0
    a, g = a.bfloat16().cuda(), g.bfloat16().cuda()
    use = Bounded(a, g, torch.Size((p, d)))
    norms = use.squared_norm().sqrt()
    exact = torch.stack([(y.double().T @ x.double()).norm() for x, y in zip(a, g, strict=True)])
    assert (norms >= exact).all()
    if like == "ordinary":
        assert (norms <= 1.03 * exact).all()
    c = 1.0 / norms
    for i in (0, 63):  # alone, and with everyone else, whose gradients are much like it
        assert float(use.weighted_sum(c * (torch.arange(64, device="cuda") == i)).norm()) <= 1 + 1e-9
        kept = torch.arange(64, device="cuda") != i
        others = Bounded(a[kept], g[kept], use.shape).weighted_sum(c[kept])
        assert float((use.weighted_sum(c) - others).norm()) <= 1 + 1e-5


def test_the_halves_of_what_is_weighted_are_those_that_torch_makes():
    """To the bit; any strides, and nothing of a weight of zero."""
    t = torch.randn(16, 197, 1032, device="cuda").bfloat16()
    t[1, 2, 3], c = torch.inf, torch.rand(16, device="cuda")
    c[1] = 0.0
    for given in (t, t.transpose(1, 2), t[:, ::2, 1:40]):
        made = conv_ops.weighted_halves(given, c)
        with conv_ops.kernels(on=False):
            assert torch.equal(made, bounded._halves(given, c))
        assert not made[1].any()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("d", "p"), [(1024, 4096), (72, 24), (20, 50)])
@pytest.mark.parametrize("uses", [1, 3])
def test_weighted_sums_are_those_that_torch_adds_up(transposed, d, p, uses):
    """To the bit; by the rows of the result and by its columns, of several blocks of examples."""
    a, g = (torch.randn(144 * uses, 40, n, device="cuda").bfloat16() for n in (d, p))
    use = Bounded(a, g, torch.Size((d, p) if transposed else (p, d)), transposed)
    c = torch.rand(144 * uses, device="cuda")
    made = use.weighted_sums(c, uses)
    with conv_ops.kernels(on=False):
        assert torch.equal(made, use.weighted_sums(c, uses))


@pytest.mark.parametrize("columns", [64, 3072])
def test_a_gram_matrix_depends_on_its_own_example_alone(columns):
    """Positions are read on into the next example, whatever that holds; also of a few columns at a time."""
    t = torch.randn(4, 197, columns, device="cuda").bfloat16()
    gram = bounded._grams([t])
    assert gram.shape == (4, 200, 200)
    assert not gram[:, 197:].any()
    assert not gram[:, :, 197:].any()
    torch.testing.assert_close(gram[:, :197, :197], t.float() @ t.float().mT, rtol=1e-3, atol=1e-2)
    for bad in (torch.nan, torch.inf, 3e38):
        for i in range(4):
            spoiled, kept = t.clone(), torch.arange(4, device="cuda") != i
            spoiled[i] = bad
            assert torch.equal(bounded._grams([spoiled])[kept], gram[kept])


@pytest.mark.parametrize("t", [16, 200, 512])
def test_forms_of_gram_matrices_are_those_that_torch_makes(t):
    """Up to what fp32 rounds; what is not finite stays in its example."""
    a, g = (torch.randn(6, t, n, device="cuda") for n in (64, 96))
    a[1, t // 2 :], g[2, 3, 4] = 0.0, torch.nan
    k, j = a @ a.mT, g @ g.mT
    made = bounded._forms(k, j)
    with conv_ops.kernels(on=False):
        torch.testing.assert_close(made, bounded._forms(k, j), rtol=1e-5, atol=0.0, equal_nan=True)
    assert made.isnan().any(1).tolist() == [False, False, True, False, False, False]
    exact = (k.double() * j.double()).sum((1, 2))
    torch.testing.assert_close(made[:, 0], exact, rtol=1e-12, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("shape", [(64, 197, 1024), (8, 512, 1280), (3, 5, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_normalisations_are_those_that_torch_makes(kind, shape, dtype, monkeypatch):
    monkeypatch.setattr(unsummed, "COPIED", 0)
    layer = {"layer_norm": torch.nn.LayerNorm, "rms_norm": torch.nn.RMSNorm}[kind](shape[2], device="cuda")
    x, g = torch.randn(shape, device="cuda").to(dtype) + 3, torch.randn(shape, device="cuda")
    g[1, 2, 3] = torch.nan
    rule = getattr(norm, kind)
    with surroundings(rows=1), torch.no_grad():
        made = rule(layer, (x,), g)
        with conv_ops.kernels(on=False):
            expected = rule(layer, (x,), g)
    assert made.keys() == expected.keys() == set(layer.parameters())
    for p in layer.parameters():
        torch.testing.assert_close(made[p].g, expected[p].g, rtol=1e-4, atol=1e-3, equal_nan=True)
