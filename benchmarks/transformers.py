"""What private fine-tuning of a stock transformer costs, in the user's own loop, beside plain training in the same run.

    python -m benchmarks.transformers                                        # GPT-2, full and LoRA, at three shapes
    python -m benchmarks.transformers --model roberta-large --shapes 16x128
    python -m benchmarks.transformers --shapes 64x128 --only plain adamw --profile adamw
    python -m benchmarks.transformers --device cpu --tiny --shapes 2x8       # tries every contender, times nothing of use

Weights are random and batches made up, of one size: nothing is downloaded. Models run eagerly under bf16 autocast; time is
the median of steps (forward, backward, ``step``, ``zero_grad``) after a warm-up, memory the peak while they run. ``check`` is
how long the first step took, in which the model is tried on made-up inputs. Batches are not Poisson samples here, so that all
contenders do the same work: noise is drawn and added as always. Opacus takes neither tied weights nor ``Conv1D`` nor positions
of one row, so its GPT-2 is the one with a head of its own and linear layers.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import json
import pstats
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dpivon

DIM = {"gpt2": (768, 12, 12), "gpt2-medium": (1024, 24, 16), "gpt2-large": (1280, 36, 20)}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
LITTLE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
MODELS = (*DIM, "roberta-large", "vit-large")
CONTENDERS = ("plain", "adamw", "ivon", "opacus-ghost", "lora-plain", "lora-adamw", "lora-ivon")
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


def make_step(contender: str, name: str, rows: int, length: int, device: str, tiny: bool) -> Step:
    model = make_model(name, tiny, device)
    if contender.startswith("lora-"):
        model = with_lora(model)
    model = (for_opacus(model) if contender == "opacus-ghost" else model).to(device).train()
    inputs, labels = make_batch(name, model, rows, length, device)
    trained = [p for p in model.parameters() if p.requires_grad]
    kind = contender.removeprefix("lora-")
    optimizer: Any = torch.optim.AdamW(trained, lr=1e-5)
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
    if kind != "plain":
        net, optimizer, _ = dpivon.PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, **private
        )

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


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(step: Step, device: str, warmup: int, steps: int) -> dict[str, float]:
    started = time.perf_counter()
    step()
    wait(device)
    check = time.perf_counter() - started
    for _ in range(warmup):
        step()
    wait(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        wait(device)
        times.append(1e3 * (time.perf_counter() - started))
    peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
    return {"ms": statistics.median(times), "gb": peak, "check": check}


def profile(step: Step, device: str) -> str:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else []
    with torch.profiler.profile(activities=kinds, record_shapes=True) as found:
        for _ in range(2):
            step()
        wait(device)
    order = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    averages = found.key_averages(group_by_input_shape=True)
    return str(averages.table(sort_by=order, row_limit=45, max_name_column_width=60, max_shapes_column_width=70))


def host_profile(step: Step, device: str) -> str:
    """Which Python functions a step spends its host's time in, and how long the host takes until all is launched."""
    wait(device)
    started = time.perf_counter()
    step()
    launched = 1e3 * (time.perf_counter() - started)
    wait(device)
    recorder = cProfile.Profile()
    recorder.enable()
    for _ in range(3):
        step()
        wait(device)
    recorder.disable()
    text = io.StringIO()
    found = pstats.Stats(recorder, stream=text)
    found.sort_stats("tottime").print_stats(40)
    found.sort_stats("cumtime").print_stats("dpivon|torch/optim|run_backward", 60)
    return f"launched after {launched:.1f} ms\n{text.getvalue()}"


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument(
        "--shapes",
        default="64x128,16x512,8x1024",
        help="batch x tokens, or batch x pixels of a side; model:shape for another model",
    )
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="a model of the same kind, and next to no size")
    parser.add_argument(
        "--profile", nargs="*", choices=CONTENDERS, default=[], help="print where these spend their time"
    )
    parser.add_argument(
        "--host", nargs="*", choices=CONTENDERS, default=[], help="print where their Python code spends its time"
    )
    parser.add_argument("--json", help="write the rows there")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    name = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    print(
        f"{given.model}{' (tiny)' if given.tiny else ''}, {name}, torch {torch.__version__}, dpivon {dpivon.__version__}"
    )
    found: list[dict[str, Any]] = []
    for named in given.shapes.split(","):
        model, _, shape = named.rpartition(":")
        model = model or given.model
        rows, length = map(int, shape.split("x"))
        base: dict[str, dict[str, float]] = {}
        for contender in given.only:
            try:
                step = make_step(contender, model, rows, length, given.device, given.tiny)
                result = measure(step, given.device, given.warmup, given.steps)
            except (Exception, torch.OutOfMemoryError) as error:
                print(
                    f"{named:>8} {contender:<13} {type(error).__name__}: {' '.join(str(error).split())[:160]}",
                    flush=True,
                )
                traceback.print_exc()
                free()
                continue
            base[contender] = result
            plain = base.get("lora-plain" if contender.startswith("lora-") else "plain", result)
            ratio, room = result["ms"] / plain["ms"], result["gb"] / plain["gb"] if plain["gb"] else 0.0
            found.append(
                {"model": model, "shape": shape, "contender": contender, **result, "ratio": ratio, "room": room}
            )
            print(
                f"{named:>8} {contender:<13} {result['ms']:8.1f} ms {ratio:5.2f} x   {result['gb']:6.1f} GB {room:5.2f} x   "
                f"first step {result['check']:5.1f} s",
                flush=True,
            )
            if contender in given.profile:
                print(profile(step, given.device), flush=True)
            if contender in given.host:
                print(host_profile(step, given.device), flush=True)
            del step
            free()
    if given.json:
        with open(given.json, "w") as file:
            json.dump(
                {"device": name, "torch": torch.__version__, "command": sys.argv[1:], "rows": found}, file, indent=1
            )


if __name__ == "__main__":
    main()
