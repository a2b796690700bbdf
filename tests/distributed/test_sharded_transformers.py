"""FSDP2 on a stock GPT-2: the clipped sum of one process, and one example moves it by at most C."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from processes import run
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

import dpivon
from dpivon.errors import pip_line
from dpivon.shards import whole

transformers = pytest.importorskip("transformers", reason=pip_line("huggingface"))
peft = pytest.importorskip("peft", reason=pip_line("huggingface"))
from dpivon.integrations.huggingface import per_example_loss  # noqa: E402

N, C, WORDS, LENGTH = 9, 0.05, 13, 6
GONE = (3, 4)  # an example of each rank


def gpt2(tuning: str) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    net = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.2 * torch.randn_like(p))
    if "checkpointed" in tuning:
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        net.enable_input_require_grads()
    if "LoRA" in tuning:
        lora = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, fan_in_fan_out=True)
        net = peft.get_peft_model(net, lora)
    return net


def clipped_sums(rank: int, tuning: str, sharded: bool) -> list[Tensor]:
    """The sum over all examples of one step without noise, and without the loss of each that is gone."""
    tokens = torch.randint(3, WORDS, (N, LENGTH), generator=torch.Generator().manual_seed(0))
    found = []
    for gone in (None, *GONE):
        labels = tokens.clone()
        if gone is not None:
            labels[gone] = -100
        net = gpt2(tuning)
        if sharded:
            policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if "bf16 weights" in tuning else {}
            blocks = net.get_base_model().transformer.h if "LoRA" in tuning else net.transformer.h
            for part in (*blocks, net):
                fully_shard(part, **policy)
        engine = dpivon.PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=net,
            optimizer=torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.0),
            data_loader=DataLoader([{"x": x, "y": y} for x, y in zip(tokens, labels, strict=True)], batch_size=N),
            noise_multiplier=0.0,
            max_grad_norm=C,
            expected_batch_size=N,  # q = 1: everyone is in every batch
        )
        loss_fn = per_example_loss(net)
        engine.check(lambda model, batch, loss_fn=loss_fn: loss_fn(model(input_ids=batch["x"]), batch["y"]))
        for batch in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16) if "autocast" in tuning else nullcontext():
                outputs = model(input_ids=batch["x"])
            loss_fn(outputs, batch["y"]).backward()
            optimizer.step()
        released = optimizer.last_release.gradients
        found.append(torch.cat([N * whole(released[p], p).double().flatten() for p in optimizer.params]))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("tuning", "rounding"),
    [
        ("all", 1e-6),
        pytest.param("LoRA, autocast", 1e-6, marks=pytest.mark.slow),
        pytest.param("all, autocast", 1e-6, marks=pytest.mark.slow),
        pytest.param("LoRA", 1e-6, marks=pytest.mark.slow),
        pytest.param("all, checkpointed", 1e-6, marks=pytest.mark.slow),
        pytest.param("all, bf16 weights", 0.05, marks=pytest.mark.slow),  # against weights in fp32
    ],
)
def test_a_stock_gpt2_has_the_sum_of_one_process_and_no_example_moves_it_by_more_than_C(tuning, rounding):
    alone = clipped_sums(0, tuning, False)
    for found in run(2, clipped_sums, tuning, True):
        for here, there in zip(found, alone, strict=True):
            assert float((here - there).norm()) <= rounding * float(there.norm())
        for without in found[1:]:
            assert 0.9 < float((found[0] - without).norm()) / C <= 1 + 1e-5
