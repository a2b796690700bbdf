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

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dpivon
from benchmarks.transformer_steps import (
    CONTENDERS,
    DIM,
    MODELS,
    Empty,
    Step,
    autocast_logits,
    each_loss,
    loss_of,
    make_batch,
    make_model,
    make_step,
    with_lora,
)
from dpivon.privacy.physical_batch import _Limit, _search, out_of_memory

CPU_MEMORY = 3e7  # bytes among which --largest searches on a CPU


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
