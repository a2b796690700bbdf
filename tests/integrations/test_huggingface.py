"""Hugging Face's GPT-2 through the book-keeping: its clipped sums are those of a loop over examples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpivon.errors import PrivacyError, pip_line
from dpivon.privacy.clipping import FlatClipping
from dpivon.privacy.gradients.bookkeeping import BookKeeper, has_rules

transformers = pytest.importorskip("transformers", reason=pip_line("huggingface"))
peft = pytest.importorskip("peft", reason=pip_line("huggingface"))
C = 0.05


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=12, n_positions=6, n_embd=8, n_layer=2, n_head=2, num_labels=3, pad_token_id=0, bos_token_id=0,
        eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, initializer_range=0.3,
    )  # fmt: skip
    return transformers.GPT2ForSequenceClassification(config).double()


def with_lora() -> nn.Module:
    lora = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, init_lora_weights=False
    )
    return peft.get_peft_model(gpt2(), lora)


def test_positions_looked_up_once_for_the_batch_are_refused():
    model = gpt2().train()
    keeper = BookKeeper(model, batch_first=True, loss_reduction="mean")
    with pytest.raises(PrivacyError, match="saw 1 rows in a batch of 5"):
        F.cross_entropy(model(input_ids=torch.randint(1, 12, (5, 6))).logits, torch.randint(3, (5,))).backward()
    keeper.clear()


@pytest.mark.parametrize("build", [gpt2, with_lora])
def test_clipped_sums_are_those_of_a_loop_over_examples(build):
    model = build().double().train()
    assert has_rules(model)
    x = torch.randint(1, 12, (5, 6))
    y = torch.randint(3, (5,))
    places = torch.arange(6).expand(
        5, 6
    )  # one row an example: left out, GPT-2 looks its positions up once for all of them
    params = [p for p in model.parameters() if p.requires_grad]
    expected, clipped = [torch.zeros_like(p) for p in params], 0
    for i in range(5):
        row = slice(i, i + 1)
        loss = F.cross_entropy(model(input_ids=x[row], position_ids=places[row]).logits, y[row])
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        g = [torch.zeros_like(p) if t is None else t for p, t in zip(params, grads, strict=True)]
        norm = float(torch.cat([t.flatten() for t in g]).norm())
        clipped += norm > C  # by C/(‖g‖ + 1e-6), as Opacus does
        expected = [e + t * min(1.0, C / (norm + 1e-6)) for e, t in zip(expected, g, strict=True)]
    assert clipped == 5  # or the bound would not be tested

    keeper = BookKeeper(model, batch_first=True, loss_reduction="mean")
    F.cross_entropy(model(input_ids=x, position_ids=places).logits, y).backward()
    sums = keeper.clipped_sums(params, FlatClipping(C))
    assert float(torch.cat([e.flatten() for e in expected]).norm()) > C / 10
    for found, wanted in zip(sums, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-13)
