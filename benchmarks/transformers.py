"""What private fine-tuning of a stock transformer costs, in the user's own loop, beside plain training in the same run.

    python -m benchmarks.transformers                                        # GPT-2, full and LoRA, at three shapes
    python -m benchmarks.transformers --model roberta-large --shapes 16x128
    python -m benchmarks.transformers --shapes 64x128 --only plain adamw --profile adamw
    python -m benchmarks.transformers --largest --shapes 64x128              # the largest physical batch at 128 tokens
    python -m benchmarks.transformers --device cpu --tiny --shapes 2x8       # tries every contender, times nothing of use

Weights are random and batches made up, of one size: nothing is downloaded. Models run under bf16 autocast, eagerly but for the
``compiled`` ones: ``compiled-plain`` is plain training compiled and captured as a CUDA graph, the others are
``engine.compile``. All contenders of a shape are kept and take turns, a few steps each: time is the median of all steps
(forward, backward, ``step``, ``zero_grad``) after a warm-up, beside the least and the largest median of a turn. Memory is the
peak of a contender's own, and with a CUDA graph all that it keeps. ``first step`` is how long the step took in which the model
is tried on made-up inputs, ``ready`` until all was compiled and warm. Batches are
not Poisson samples here, so that all contenders do the same work: noise is drawn and added as always. Opacus takes neither tied
weights nor ``Conv1D`` nor positions of one row, so its GPT-2 is the one with a head of its own and linear layers.
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
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dpivon
from benchmarks.plain import capture
from dpivon.integrations.huggingface import per_example_loss
from dpivon.privacy.physical_batch import _Limit, _search, out_of_memory

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
CPU_MEMORY = 3e7  # bytes among which --largest searches on a CPU
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


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@dataclass
class Contender:
    """A step that was made ready, what it takes, and the turns it was timed in."""

    step: Step
    check: float  # seconds of the first step,
    ready: float  # and until it could be timed
    gb: float
    turns: list[list[float]] = field(default_factory=list)

    @property
    def ms(self) -> float:
        return statistics.median([t for turn in self.turns for t in turn])

    def row(self) -> dict[str, Any]:
        medians = [statistics.median(turn) for turn in self.turns]
        return {
            "ms": self.ms,
            "least": min(medians),
            "most": max(medians),
            "gb": self.gb,
            "check": self.check,
            "ready": self.ready,
        }


def made_ready(make: Callable[[], Step], device: str, warmup: int, *, captured: bool) -> Contender:
    """Beside others, which keep their memory."""
    free()
    gpu = device == "cuda"
    held, reserved = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if gpu else (0, 0)
    started = time.perf_counter()
    step = make()
    step()
    wait(device)
    check = time.perf_counter() - started
    for _ in range(warmup):
        step()
    wait(device)
    ready, peak = time.perf_counter() - started, 0
    if gpu and captured:
        free()
        peak = torch.cuda.memory_reserved() - reserved  # a replay allocates nothing
    elif gpu:
        torch.cuda.reset_peak_memory_stats()
        step()
        wait(device)
        peak = torch.cuda.max_memory_allocated() - held
    return Contender(step, check, ready, peak / 1e9)


def turn(step: Step, device: str, steps: int) -> list[float]:
    step()  # awake again, and not measured
    wait(device)
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        wait(device)
        times.append(1e3 * (time.perf_counter() - started))
    return times


def base_of(contender: str) -> str:
    kind, dash, _ = contender.partition("-")
    return f"{kind}-plain" if dash and kind in ("lora", "compiled") else "plain"


def rows_of(ready: dict[str, Contender], model: str, shape: str) -> list[dict[str, Any]]:
    rows = []
    for name, own in ready.items():
        if own.turns:
            base = ready.get(base_of(name), own)
            ratios = {"ratio": own.ms / base.ms, "room": own.gb / base.gb if base.gb else 0.0}
            rows.append({"model": model, "shape": shape, "contender": name, **own.row(), **ratios})
    return rows


def shown(row: dict[str, Any]) -> str:
    what, time = f"{row['model']}:{row['shape']}", f"{row['ms']:8.1f} ms ({row['least']:.1f} to {row['most']:.1f})"
    first = f"first step {row['check']:5.1f} s, ready {row['ready']:5.1f} s"
    return f"{what:<14} {row['contender']:<15} {time} {row['ratio']:5.2f} x {row['gb']:6.1f} GB {row['room']:5.2f} x   {first}"


def largest(name: str, length: int, device: str, tiny: bool, lora: bool) -> dict[str, int]:
    """The largest physical batch of plain training, and of ours, in the same memory."""
    found = {}
    for private in (False, True):
        model = make_model(name, tiny, device).train()
        model = (with_lora(model) if lora else model).to(device)
        inputs, labels = make_batch(name, model, 4, length, device)
        optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
        if private:
            loader = DataLoader(Empty(), batch_size=64)
            engine = dpivon.PrivacyEngine()
            engine.make_private(
                module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
            )
            batch = {**inputs, "labels": inputs["input_ids"] if name in DIM else labels}
            memory = None if device == "cuda" else CPU_MEMORY
            found["private"] = engine.largest_physical_batch(
                each_loss(model, device), batch, at_most=8192, memory=memory
            )
        else:
            found["plain"] = _search(partial(fits, name, model, optimizer, length, device), 8192)
        del model, optimizer
        free()
    return found


def fits(name: str, model: nn.Module, optimizer: Any, length: int, device: str, rows: int) -> bool:
    """Whether plain training has memory for so many examples."""
    held = [t for own in optimizer.state.values() for t in own.values() if isinstance(t, Tensor)]
    try:
        with nullcontext() if device == "cuda" else _Limit(CPU_MEMORY, [*model.parameters(), *model.buffers(), *held]):
            inputs, labels = make_batch(name, model, rows, length, device)
            loss_of(autocast_logits(model, inputs, device), labels).backward()
            optimizer.step()
            wait(device)
        return True
    except Exception as error:
        if not out_of_memory(error):
            raise
    finally:
        optimizer.zero_grad()
    free()
    return False


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
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="that a contender makes in a round")
    parser.add_argument("--tiny", action="store_true", help="a model of the same kind, and next to no size")
    parser.add_argument("--largest", action="store_true", help="find the largest physical batches, and time nothing")
    parser.add_argument(
        "--fraction", type=float, default=0.15, help="of the GPU's memory, among which --largest searches"
    )
    parser.add_argument(
        "--profile", nargs="*", choices=CONTENDERS, default=[], help="print where these spend their time"
    )
    parser.add_argument(
        "--host", nargs="*", choices=CONTENDERS, default=[], help="print where their Python code spends its time"
    )
    parser.add_argument("--json", help="write the rows there, after every round")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    name = torch.cuda.get_device_name() if given.device == "cuda" else "CPU"
    print(
        f"{given.model}{' (tiny)' if given.tiny else ''}, {name}, torch {torch.__version__}, dpivon {dpivon.__version__}"
    )
    found: list[dict[str, Any]] = []

    def write(rows: list[dict[str, Any]]) -> None:
        if given.json:
            facts = {"device": name, "torch": torch.__version__, "command": sys.argv[1:]}
            with open(given.json, "w") as file:
                json.dump({**facts, "rows": found + rows}, file, indent=1)

    for named in given.shapes.split(","):
        model, _, shape = named.rpartition(":")
        model = model or given.model
        rows, length = map(int, shape.split("x"))
        if given.largest:
            if given.device == "cuda":
                torch.cuda.set_per_process_memory_fraction(given.fraction)
            for lora in (False, True) if model in DIM else (False,):
                sizes = largest(model, length, given.device, given.tiny, lora)
                found.append({"model": model, "length": length, "lora": lora, **sizes})
                ratio, what = sizes["private"] / sizes["plain"], f"{model}{' with LoRA' if lora else ''}"
                print(
                    f"{what}, {length}: plain {sizes['plain']}, private {sizes['private']}, {ratio:.2f} x", flush=True
                )
                write([])
            continue
        ready: dict[str, Contender] = {}
        for contender in given.only:
            try:
                ready[contender] = made_ready(
                    partial(make_step, contender, model, rows, length, given.device, given.tiny),
                    given.device,
                    given.warmup,
                    captured=contender.startswith("compiled-"),
                )
            except Exception as error:
                print(f"{named} {contender} {type(error).__name__}: {' '.join(str(error).split())[:160]}", flush=True)
                traceback.print_exc()
                free()
                continue
            path = getattr(ready[contender].step, "path", None)
            print(f"{named} {contender} is ready{f', {path()}' if path else ''}", file=sys.stderr, flush=True)
        for k in range(given.rounds):
            for own in ready.values():
                own.turns.append(turn(own.step, given.device, given.steps))
            write(rows_of(ready, model, shape))
            if k in (0, given.rounds - 1):
                print(*map(shown, rows_of(ready, model, shape)), sep="\n", flush=True)
        found += rows_of(ready, model, shape)
        for contender, own in ready.items():
            if contender in given.profile:
                print(profile(own.step, given.device), flush=True)
            if contender in given.host:
                print(host_profile(own.step, given.device), flush=True)
        del ready, own
        free()


if __name__ == "__main__":
    main()
