"""The measured numbers of benchmarks: functions for the marks of :mod:`experiments.numbers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.shown import lines

from benchmarks import cost_model
from dpivon.methods import METHODS

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
MODELS = {"gpt2": "GPT-2", "roberta-large": "RoBERTa-large", "vit-large": "ViT-large"}
CONTENDERS = {
    "adamw": "AdamW",
    "ivon": "IVON",
    "lora-adamw": "LoRA, AdamW",
    "lora-ivon": "LoRA, IVON",
    "opacus-ghost": "Opacus, ghost clipping",
}


def file(path: str, keys: str, form: str, factor: str = "1") -> str:
    """One number of a JSON file: ``keys`` lead to it, separated by slashes, with underscores for spaces."""
    found = json.loads((ROOT / path).read_text())
    for key in keys.split("/"):
        found = found[int(key) if isinstance(found, list) else key if key in found else key.replace("_", " ")]
    return format(float(factor) * found, form)


def step(name: str, row: str, key: str, form: str) -> str:
    """One number of a benchmark of steps."""
    return file(f"benchmarks/results/step-{name}.json", f"rows/{row}/{key}", form)


def transformers(name: str) -> list[dict[str, Any]]:
    """Rows of a benchmark of transformers, each with its commit."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    return [{"commit": found.get("commit"), **row} for row in found["rows"] if "contender" in row]


def transformer(model: str, shape: str, contender: str, key: str, form: str, part: str = "") -> str:
    """One number of a benchmark of transformers, wherever its row stands."""
    wanted = {"model": model, "shape": shape, "contender": contender}
    (row,) = (r for r in transformers(f"transformers{part}-h200") if all(r[k] == v for k, v in wanted.items()))
    return format(row[key], form)


def transformer_table() -> str:
    """Time and peak memory over plain training, one line per model, shape and run; compiled steps come last."""
    found = []
    for path in sorted(RESULTS.glob("transformers*-h200.json")):
        measured: dict[tuple[str, str], dict[str, Any]] = {}
        for row in transformers(path.stem):
            measured.setdefault((row["model"], row["shape"]), {})[row["contender"]] = row
        for (model, shape), rows in measured.items():
            for kind in ("", "compiled-"):
                if f"{kind}plain" in rows:
                    what = f"{MODELS.get(model, model.replace('gpt', 'GPT-'))}, {shape.replace('x', ' × ')}"
                    own = {k: rows[kind + k] for k in ("plain", *CONTENDERS) if kind + k in rows}
                    found.append((kind, what + (", compiled" if kind else ""), own))
    found.sort(key=lambda line: line[0])
    shown = [k for k in CONTENDERS if any(k in own for *_, own in found)]
    body = []
    for _, what, own in found:
        cells = [f"{own[k]['ratio']:.2f} · {own[k]['room']:.2f}" if k in own else "–" for k in shown]
        body.append([what, f"{own['plain']['ms']:.1f}", *cells, ", ".join(sorted({r["commit"] for r in own.values()}))])
    return lines(
        ["batch × tokens, or × pixels of a side", "plain, ms", *(CONTENDERS[k] for k in shown), "commit"], body
    )


def method_costs() -> str:
    """Time and peak memory of a step of every method over DP-SGD's, and numbers kept per weight."""
    rows = {
        name: row
        for part in ("-calm", "")
        for name, row in json.loads((RESULTS / f"methods-cpu{part}.json").read_text())["rows"].items()
    }
    rows["ivon"] = rows["dp-ivon-reparam"]
    named = [(f"`{m.name}`", m.name, m.choose) for m in METHODS.values()]
    named.append(("`dp-sgd` with `ema=`", "dp-sgd+ema", "averaged iterates, for any method: see below"))
    body = [
        [what, f"{rows[name]['time']:.2f}", f"{rows[name]['memory']:.2f}", f"{rows[name]['floats']:.0f}", choose]
        for what, name, choose in named
    ]
    return lines(["method", "time", "peak memory", "numbers per weight", "when to choose it"], body)


def size(path: str, form: str, factor: str = "1") -> str:
    """The size of a file in bytes, times a factor."""
    return format(float(factor) * (ROOT / path).stat().st_size, form)


def constant(name: str, form: str, factor: str = "1") -> str:
    """A constant of the cost model, times a factor."""
    return format(float(factor) * getattr(cost_model.constants(), name), form)


def cnn_efficiency(ranks: str) -> str:
    """What the cost model has of perfect scaling for one run of the paper's CNN, in per cent."""
    return f"{100 * cost_model.cnn_efficiency(cost_model.constants(), int(ranks)):.1f}"


def cost(table: str) -> str:
    """A table of the cost model."""
    c = cost_model.constants()
    head, body = {
        "constants": ("constant; value; where", cost_model.constant_table(c)),
        "checks": ("point that was not fitted; model; measured; error", cost_model.checks(c)),
        "time": (
            "; GPUs, network; compute; waiting for the largest part; noise and update; communication; step; of perfect",
            cost_model.time_table(c),
        ),
        "memory": ("; GPUs; frozen weights; state; kept by 8 examples; sum", cost_model.memory_table(c)),
        "parts": ("GPUs; b/W = 8; 16; 64; 256; 1024", cost_model.part_table()),
    }[table]
    return lines(head.split("; "), [line.strip("| ").split(" | ") for line in body])


MARKS = (file, step, transformer, transformer_table, method_costs, size, constant, cnn_efficiency, cost)
