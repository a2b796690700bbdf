"""How many operations one eager step of a stock transformer takes on the host: ``benchmarks.overhead --transformers``.

Models have as many layers and tensors as GPT-2 and RoBERTa-large, and next to no width. Limits in bytes are as much smaller,
so that every layer is handled as at its whole size with 64 or 16 texts of 128 tokens on a GPU.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks import transformer_steps as whole
from benchmarks.overhead import Counting, as_on_a_gpu
from dpivon.optim import tensors
from dpivon.privacy import mechanism, precision
from dpivon.privacy.layers import bounded, uses

WIDTH, ROWS, TOKENS = 64, 2, 8
#: By name: (model, plain contender, private contender, how many of its largest layers are measured and summed together)
TRANSFORMERS = {
    "gpt2": ("gpt2", "plain", "adamw", 11),
    "gpt2-lora": ("gpt2", "lora-plain", "lora-adamw", 11),
    "roberta-large": ("roberta-large", "plain", "adamw", 6),
}


@torch.library.custom_op("dpivon_benchmarks::product", mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor")
def _product(a: Tensor, b: Tensor) -> Tensor:
    return a.float() @ b.float()


@torch.library.custom_op("dpivon_benchmarks::product_into", mutates_args={"out"})
def _product_into(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.matmul(a.float(), b.float(), out=out)


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """A product of bf16 as one operation, as a GPU has it."""
    if a.dtype != torch.bfloat16:
        return _PRODUCT(a, b, out)
    if out is None:
        made: Tensor = torch.ops.dpivon_benchmarks.product(a, b)
        return made
    torch.ops.dpivon_benchmarks.product_into(a, b, out)
    return out


_PRODUCT = precision.product


def thin_model(name: str, tiny: bool) -> nn.Module:
    import transformers as hf

    if name == "gpt2":
        size = {"n_embd": WIDTH, "n_layer": 12, "n_head": 2, "n_positions": 32, "vocab_size": 60}
        return hf.GPT2LMHeadModel(hf.GPT2Config(**size, use_cache=False, bos_token_id=0, eos_token_id=0))
    size = {"hidden_size": WIDTH, "num_hidden_layers": 24, "num_attention_heads": 2, "intermediate_size": 4 * WIDTH}
    config = hf.RobertaConfig(**size, vocab_size=60, max_position_embeddings=32, num_labels=whole.LABELS)
    return hf.RobertaForSequenceClassification(config)


@contextmanager
def as_whole(name: str) -> Iterator[None]:
    """The branches of a GPU, and limits as much smaller as the model is."""
    together = TRANSFORMERS[name][3]
    room = together * (16 * 4 * WIDTH**2 + 8 * ROWS * TOKENS**2)
    with ExitStack() as stack:
        stack.enter_context(as_on_a_gpu())
        stack.enter_context(mock.patch.object(mechanism, "joins", tensors.joins))
        for module in (bounded, uses, precision):
            stack.enter_context(mock.patch.object(module, "product", product))
        stack.enter_context(mock.patch.object(uses, "readable", return_value=False))
        stack.enter_context(mock.patch.object(uses, "_FEW_BYTES", 4 * ROWS * 1000))
        stack.enter_context(mock.patch.object(uses, "MEMORY_CAP", room))
        stack.enter_context(mock.patch.object(bounded, "MADE_BYTES", 4 * ROWS * 3000))
        stack.enter_context(mock.patch.object(whole, "new_model", thin_model))
        yield


def counts(step: Callable[[], None]) -> dict[str, int]:
    """Of one step after a few: operations, those of them that launch something, and Python's function calls."""
    for _ in range(3):
        step()
    with Counting() as counting:
        step()
    recorder = cProfile.Profile()
    recorder.enable()
    step()
    recorder.disable()
    calls = pstats.Stats(recorder).total_calls  # type: ignore[attr-defined]
    return {"operations": counting.operations, "launches": counting.launches, "calls": calls}


def counted(name: str) -> dict[str, dict[str, int]]:
    """Of plain training, and of private."""
    model, plain, private, _ = TRANSFORMERS[name]
    with as_whole(name), mock.patch.object(torch.optim, "AdamW", _foreach_adamw):
        steps = {kind: whole.make_step(kind, model, ROWS, TOKENS, "cpu", True) for kind in (plain, private)}
        return {kind: counts(step) for kind, step in steps.items()}


_ADAMW = torch.optim.AdamW


def _foreach_adamw(*args: object, **options: object) -> torch.optim.Optimizer:
    """As on a GPU."""
    return _ADAMW(*args, foreach=True, **options)  # type: ignore[arg-type]


def print_counts() -> dict[str, dict[str, dict[str, int]]]:
    """By model and contender."""
    models = {}
    for name in TRANSFORMERS:
        rows = models[name] = counted(name)
        print(f"{name:62s} {'operations':>11s} {'launches':>9s} {'Python calls':>13s}")
        for kind, row in rows.items():
            print(f"  {kind:60s} {row['operations']:11d} {row['launches']:9d} {row['calls']:13d}", flush=True)
    return models
