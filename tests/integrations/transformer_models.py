"""Tiny random models of transformers, one of each architecture and task, with made-up batches and a loss per example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dpivon
from dpivon.integrations.huggingface import per_example_loss
from dpivon.privacy.layers import bounded, uses
from dpivon.privacy.layers.bounded import Bounded
from dpivon.privacy.precision import capturing

VOCABULARY, LENGTH, LABELS = 13, 6, 3
ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": LABELS}
SIZE = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, **ENDS}
WORDS = SIZE | {"vocab_size": VOCABULARY, "max_position_embeddings": 16}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGES = {"image_size": 8, "patch_size": 4, "num_channels": 3}
SHARED_KEYS = WORDS | {"num_key_value_heads": 1, "head_dim": 4}  # grouped-query attention

CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=2, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0,
        resid_pdrop=0.0, **ENDS,
    ),
    "bert": lambda: hf.BertConfig(**WORDS, **STILL),
    "roberta": lambda: hf.RobertaConfig(**WORDS | {"pad_token_id": 1, "bos_token_id": 0}, **STILL),
    "distilbert": lambda: hf.DistilBertConfig(
        vocab_size=VOCABULARY, dim=8, n_layers=2, n_heads=2, hidden_dim=16, max_position_embeddings=16, dropout=0.0,
        attention_dropout=0.0, seq_classif_dropout=0.0, num_labels=LABELS,
    ),
    "opt": lambda: hf.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, ffn_dim=16,
        max_position_embeddings=16, word_embed_proj_dim=8, dropout=0.0, **ENDS,
    ),
    "llama": lambda: hf.LlamaConfig(**SHARED_KEYS),
    "qwen2": lambda: hf.Qwen2Config(**SHARED_KEYS),
    "gemma": lambda: hf.GemmaConfig(**SHARED_KEYS),
    "mistral": lambda: hf.MistralConfig(**SHARED_KEYS),
    "mixtral": lambda: hf.MixtralConfig(**SHARED_KEYS, num_local_experts=4, num_experts_per_tok=2),
    "t5": lambda: hf.T5Config(
        vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.0,
        classifier_dropout=0.0, relative_attention_num_buckets=8, decoder_start_token_id=0, **ENDS,
    ),
    "vit": lambda: hf.ViTConfig(**SIZE, **STILL, **IMAGES),
    "deit": lambda: hf.DeiTConfig(**SIZE, **STILL, **IMAGES),
    "clip": lambda: hf.CLIPConfig(
        vision_config={**SIZE, **IMAGES, "attention_dropout": 0.0}, projection_dim=8, num_labels=LABELS
    ),
    "whisper": lambda: hf.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=4, encoder_layers=2, encoder_attention_heads=2, decoder_layers=1,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, d_model=8, max_source_positions=LENGTH,
        max_target_positions=8, dropout=0.0, decoder_start_token_id=1, classifier_proj_size=8, **ENDS,
    ),
}  # fmt: skip
TASKS: dict[str, Any] = {
    "causal LM": hf.AutoModelForCausalLM,
    "sequence classification": hf.AutoModelForSequenceClassification,
    "token classification": hf.AutoModelForTokenClassification,
    "sequence to sequence": hf.AutoModelForSeq2SeqLM,
    "images": hf.AutoModelForImageClassification,
    "audio (encoder)": hf.AutoModelForAudioClassification,
}
_TEXT = ("causal LM", "sequence classification", "token classification")
MODELS = [(name, task) for name in ("gpt2", "llama", "qwen2", "gemma", "mistral", "mixtral") for task in _TEXT]
MODELS += [(name, task) for name in ("bert", "roberta", "distilbert") for task in _TEXT[1:]]
MODELS += [("opt", task) for task in _TEXT[:2]]
MODELS += [("t5", task) for task in ("sequence to sequence", *_TEXT[1:])]
MODELS += [("vit", "images"), ("deit", "images"), ("clip", "images"), ("whisper", "audio (encoder)")]
TUNINGS = ("all", "head and last block", "LoRA", "DoRA")


def make(name: str, task: str, tuning: str = "all") -> nn.Module:
    """A model in training mode, with weights large enough for every layer to have a gradient worth comparing."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config._experts_implementation = "eager"  # the others take no doubles
    kinds = {"deit": hf.DeiTForImageClassification, "clip": hf.CLIPForImageClassification}
    model = kinds[name](config) if name in kinds else TASKS[task].from_config(config, attn_implementation="sdpa")
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    if tuning == "head and last block":
        trained = list(model.parameters())
        for p in trained[: len(trained) // 2]:
            p.requires_grad_(False)
    elif tuning != "all":
        layers = (
            ["q_proj", "v_proj", "o_proj"] if name == "mixtral" else "all-linear"
        )  # peft rewrites an expert's weights
        lora = peft.LoraConfig(
            r=2, target_modules=layers, init_lora_weights=tuning == "DoRA", use_dora=tuning == "DoRA"
        )
        model = peft.get_peft_model(model, lora)
    return model.train()


def make_batch(name: str, task: str, rows: int) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs with padding and labels, some of them -100."""
    labels = torch.randint(LABELS, (rows,))
    if task == "images":
        return {"pixel_values": torch.randn(rows, 3, 8, 8)}, labels
    if task == "audio (encoder)":
        return {"input_features": torch.randn(rows, 4, 2 * LENGTH)}, labels
    tokens, mask = torch.randint(3, VOCABULARY, (rows, LENGTH)), torch.ones(rows, LENGTH, dtype=torch.long)
    if name == "t5":
        tokens[:, -1] = 2
    elif name != "mixtral":  # whose experts would see padding otherwise than alone
        mask[::2, -2:] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask}
    if task == "sequence classification":
        return inputs, labels
    classes = LABELS if task == "token classification" else VOCABULARY
    labels = torch.randint(3 if classes > 3 else 0, classes, (rows, LENGTH))
    if task == "sequence to sequence":
        inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (rows, LENGTH))
    labels[0, 1:] = labels[1, 3:] = -100
    return inputs, labels


def loss_of_each(logits: Tensor, labels: Tensor, task: str) -> Tensor:
    """By F.cross_entropy alone: what dpivon's own helper is compared with."""
    if labels.dim() == 1:
        return F.cross_entropy(logits, labels, reduction="none")
    if task == "causal LM":
        logits, labels = logits[:, :-1], labels[:, 1:]
    each = [
        F.cross_entropy(z, y, ignore_index=-100, reduction="sum") / max(1, int((y != -100).sum()))
        for z, y in zip(logits, labels, strict=True)
    ]
    return torch.stack(each)


def check_neighbours(name: str, task: str, tuning: str, device: str, monkeypatch: Any) -> None:
    """In bf16 autocast, clipped sums with and without an example differ by at most C: of gradients that are kept, and of those
    that are bounded by Gram matrices and by what is made for their norms. Without an example its loss is zero: in a batch of
    another size torch may choose other kernels for everyone."""
    rows, bound = 4, 0.05
    inputs, labels = make_batch(name, task, rows)
    inputs, labels = {key: value.to(device) for key, value in inputs.items()}, labels.to(device)
    model = make(name, task, tuning).to(device)
    params = [p for p in model.parameters() if p.requires_grad]
    private, optimizer, _ = dpivon.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(params, lr=0.0),
        data_loader=DataLoader([0] * rows, batch_size=rows),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        poisson_sampling=False,
    )

    def clipped(present: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = private(**inputs).logits
        (loss_of_each(logits.float(), labels, task) * present).mean().backward()
        optimizer.step()
        return torch.cat([rows * p.grad.double().flatten() for p in params])

    for kept, grams in ((True, True), (False, True), (False, False)):
        with monkeypatch.context() as patch:
            if not kept:
                patch.setattr(bounded, "MADE_BYTES", 0)
                patch.setattr(bounded, "MADE_RATIO", 0)
            patch.setattr(Bounded, "by_grams", property(lambda use, grams=grams: grams))
            total = clipped(torch.ones(rows, device=device))
            for gone in (rows - 2, rows - 1):
                present = (torch.arange(rows, device=device) != gone).float()
                moved = float((total - clipped(present)).norm()) / bound
                assert 0.9 < moved <= 1 + 1e-5, (kept, grams, gone, moved)


def check_captured_neighbours(name: str, device: str, monkeypatch: Any) -> None:
    """The same of a step that is recorded, where no gradient of a weight in bf16 fits into memory."""
    monkeypatch.setattr(bounded, "memory_cap", lambda t: 1 if t.dtype == torch.bfloat16 else uses.memory_cap(t))
    model = make(name, "causal LM").to(device)
    model.config.pad_token_id = None
    inputs, labels = make_batch(name, "causal LM", 8)
    check_recorded_bounds(model, inputs["input_ids"].to(device), labels.to(device), monkeypatch)


def check_recorded_bounds(model: Any, tokens: Tensor, labels: Tensor, monkeypatch: Any) -> None:
    """In bf16, sums of a recorded step that bounds its gradients differ by at most C without one of the last examples."""
    (rows, _), bound, device, recorded, sums = tokens.shape, 0.05, tokens.device, [], Bounded.weighted_sums
    monkeypatch.setattr(
        Bounded, "weighted_sums", lambda use, *given: (recorded.append(capturing()), sums(use, *given))[1]
    )
    engine = dpivon.PrivacyEngine()
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader([0] * rows, batch_size=rows),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        poisson_sampling=False,
    )

    def losses(model: Any, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(input_ids=batch["tokens"]).logits
        return loss.per_example(logits.float(), batch["labels"]) * batch["present"]

    loss, step = per_example_loss(model), engine.compile(losses, capture=True)

    def clipped(present: Tensor) -> Tensor:
        step({"tokens": tokens, "labels": labels, "present": present})
        return torch.cat([rows * p.grad.double().flatten() for p in model.parameters()])

    for _ in range(5):
        total = clipped(torch.ones(rows, device=device))
    assert step.path == "captured"
    assert any(recorded)
    for gone in (rows - 2, rows - 1):
        moved = float((total - clipped((torch.arange(rows, device=device) != gone).float())).norm()) / bound
        assert 0.9 < moved <= 1 + 1e-5, (gone, moved)
