"""Models, batches and one step of each contender of :mod:`benchmarks.transformers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dpivon
from benchmarks.plain import capture
from dpivon.integrations.huggingface import per_example_loss

DIM = {"gpt2": (768, 12, 12), "gpt2-medium": (1024, 24, 16), "gpt2-large": (1280, 36, 20)}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
LITTLE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
MODELS = (*DIM, "roberta-large", "vit-large")
CONTENDERS = (
    "plain",
    "adamw",
    "ivon",
    "opacus-ghost",
    "lora-plain",
    "lora-adamw",
    "lora-ivon",
    "compiled-plain",
    "compiled-adamw",
    "compiled-ivon",
)
LABELS = 5
Step = Callable[[], None]


class Empty(Dataset[Tensor]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(1)


def make_model(name: str, tiny: bool, device: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return new_model(name, tiny)


def new_model(name: str, tiny: bool) -> nn.Module:
    import transformers as hf

    if name in DIM:
        width, layers, heads = (32, 2, 2) if tiny else DIM[name]
        rest = {"vocab_size": 60} if tiny else {}
        config = hf.GPT2Config(n_embd=width, n_layer=layers, n_head=heads, use_cache=False, **rest)
        return hf.GPT2LMHeadModel(config)
    size = LITTLE if tiny else LARGE
    if name == "roberta-large":
        vocabulary = 60 if tiny else 50265
        config = hf.RobertaConfig(**size, vocab_size=vocabulary, max_position_embeddings=514, num_labels=LABELS)
        return hf.RobertaForSequenceClassification(config)
    return hf.ViTForImageClassification(hf.ViTConfig(**size, num_labels=LABELS))


def make_batch(name: str, model: nn.Module, rows: int, length: int, device: str) -> tuple[dict[str, Tensor], Tensor]:
    labels = torch.randint(LABELS, (rows,), device=device)
    if name == "vit-large":
        return {"pixel_values": torch.randn(rows, 3, length, length, device=device)}, labels
    tokens = torch.randint(3, model.config.vocab_size, (rows, length), device=device)  # type: ignore[union-attr]
    return {"input_ids": tokens}, tokens[:, 1:] if name in DIM else labels


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Of the next tokens, or of classes."""
    if labels.dim() == 1:
        return F.cross_entropy(logits.float(), labels)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels.flatten())


def with_lora(model: nn.Module) -> nn.Module:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))  # type: ignore[no-any-return]


def for_opacus(model: nn.Module) -> nn.Module:
    """Linear layers in place of ``Conv1D``, and a head that is not tied."""
    for name, layer in list(model.named_modules()):
        if type(layer).__name__ == "Conv1D":
            linear = nn.Linear(*layer.weight.shape)  # type: ignore[misc, arg-type]
            linear.weight.data, linear.bias.data = layer.weight.data.T.contiguous(), layer.bias.data  # type: ignore
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, linear)
    if hasattr(model, "lm_head"):
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # type: ignore[union-attr, arg-type]
    return model


def autocast_logits(model: nn.Module, inputs: dict[str, Tensor], device: str) -> Tensor:
    with torch.autocast(device, dtype=torch.bfloat16):
        logits: Tensor = model(**inputs).logits
    return logits


def each_loss(model: nn.Module, device: str) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
    """One loss per example, of a batch that holds its labels."""
    loss = per_example_loss(model)

    def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        inputs = {key: t for key, t in batch.items() if key != "labels"}
        return loss.per_example(autocast_logits(model, inputs, device).float(), batch["labels"])

    return losses


def _none_packed(position_ids: Tensor) -> None:
    return None


def plain_program(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, device: str) -> Step:
    """Plain training as fast as torch makes it: compiled, and on a GPU captured as a CUDA graph.

    Where it traces, transformers would make a mask for texts that are packed, and attention would be slower for it.
    """
    made = torch.compile(loss) if device == "cuda" else loss

    def step() -> None:
        made().backward()
        optimizer.step()
        optimizer.zero_grad()

    with mock.patch("transformers.masking_utils.find_packed_sequence_indices", _none_packed):
        return capture(step) if device == "cuda" else step


def make_step(contender: str, name: str, rows: int, length: int, device: str, tiny: bool) -> Step:
    model = make_model(name, tiny, device)
    if contender.startswith("lora-"):
        model = with_lora(model)
    model = (for_opacus(model) if contender == "opacus-ghost" else model).to(device).train()
    inputs, labels = make_batch(name, model, rows, length, device)
    trained = [p for p in model.parameters() if p.requires_grad]
    compiled, kind = contender.startswith("compiled-"), contender.removeprefix("lora-").removeprefix("compiled-")
    options = {"fused": True, "capturable": True} if compiled and device == "cuda" else {}
    optimizer: Any = torch.optim.AdamW(trained, lr=1e-5, **options)
    if kind == "ivon":
        optimizer = dpivon.IVON(trained, lr=1e-3, ess=100_000)
    loader = DataLoader(Empty(), batch_size=rows)
    private: Any = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False}
    autocast = torch.autocast(device, dtype=torch.bfloat16)
    net: Any = model
    if kind == "opacus-ghost":
        import opacus

        if name in DIM:  # one row of positions an example
            inputs["position_ids"] = torch.arange(length, device=device).repeat(rows, 1)
        net, optimizer, criterion, _ = opacus.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, grad_sample_mode="ghost",
            criterion=nn.CrossEntropyLoss(), **private,
        )  # fmt: skip

        def ghost() -> None:
            with autocast:
                logits = net(**inputs).logits
            if labels.dim() == 1:
                loss = criterion(logits.float(), labels)
            else:
                flat = logits[:, :-1].flatten(0, 1).float()
                loss = criterion(flat, labels.flatten(), shape=(rows, length - 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return ghost
    if compiled and kind == "plain":
        return plain_program(lambda: loss_of(autocast_logits(model, inputs, device), labels), optimizer, device)
    if kind != "plain":
        engine = dpivon.PrivacyEngine()
        net, optimizer, _ = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **private)
    if compiled:
        program = engine.compile(each_loss(model, device))
        batch = {**inputs, "labels": inputs["input_ids"] if name in DIM else labels}

        def replay() -> None:
            program(batch)

        replay.path = lambda: program.path  # type: ignore[attr-defined]
        return replay

    def once() -> None:
        with autocast:
            logits = net(**inputs).logits
        loss_of(logits, labels).backward()

    def step() -> None:
        if kind == "ivon":
            with optimizer.sampled_params(train=True):
                once()
        else:
            once()
        optimizer.step()
        optimizer.zero_grad()

    return step
