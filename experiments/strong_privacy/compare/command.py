"""What a comparison writes: the page, two tables and the figures, from the tables alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpivon.errors import bad
from dpivon.study.results import table
from dpivon.study.results.table import check_code
from experiments.strong_privacy.compare.bars import judge
from experiments.strong_privacy.compare.cell import SETTING, Contender
from experiments.strong_privacy.compare.field import MEAN, RAW, TEMPERED, Field
from experiments.strong_privacy.compare.figures import draw_comparison
from experiments.strong_privacy.compare.page import comparison_page
from experiments.strong_privacy.compare.scopes import scopes
from experiments.strong_privacy.compare.verdict import Bar

_MEASURES = ("accuracy", "nll", "ece")


def compare(
    outs: Sequence[Path],
    to: Path,
    *,
    tunings: Sequence[Path] = (),
    ours: str = "dp-steady",
    baselines: Sequence[str] = ("dp-sgd", "dp-adam"),
    command: str = "",
    mixed_code: bool = False,
) -> list[Path]:
    """Judge ``ours`` against ``baselines`` over the results of one or several studies; what was written.

    ``command`` is what the page says it was written by; by default all the arguments. Rows of different code are
    compared only with ``mixed_code``, and the page says so.
    """
    if ours in baselines:
        raise bad("ours", ours, "is among the baselines", "Name another method, or other baselines")
    field = Field(outs, tunings, ours, baselines)
    check_code(field.rows, mixed=mixed_code)
    found = [c for c in field.contenders if c.method == ours and not c.variant]
    if not found:
        raise bad("ours", ours, "has no run in these folders", "Name a method of theirs with --ours")
    for method in baselines:
        if Contender(method) not in field.contenders:
            raise bad("baseline", method, "has no run in these folders", "Name methods of theirs with --baseline")
    where = scopes(field)
    judged = {c: judge(field, where, c) for c in sorted(found, key=lambda c: not c.default)}
    to.mkdir(parents=True, exist_ok=True)
    figures = draw_comparison(field, where, to / "figures")
    pages = [to / name for name in ("comparison.csv", "bars.csv", "comparison.md")]
    table.write(pages[0], _entries(field), _ENTRY)
    table.write(pages[1], _lines(judged), _LINE)
    text = comparison_page(field, where, judged, figures, command or _command(outs, tunings, to, ours, baselines))
    pages[2].write_text(text, encoding="utf-8")
    return [*figures, *pages]


def _command(outs: Sequence[Path], tunings: Sequence[Path], to: Path, ours: str, baselines: Sequence[str]) -> str:
    words = ["python -m experiments.strong_privacy compare", *map(str, outs), *(f"--tuning {t}" for t in tunings)]
    return " ".join([*words, f"--ours {ours}", *(f"--baseline {b}" for b in baselines), f"--to {to}"])


_ENTRY = (
    *SETTING, "noise_multiplier", "epsilon", "epsilon_tempered", "method", "default", "variant", "lr", "chosen",
    "candidates", "validation_accuracy", "runs", "diverged", "missing",
    *(f"{kind}_{m}{end}" for kind in (MEAN, RAW, TEMPERED) for m in _MEASURES for end in ("", "_std")),
)  # fmt: skip
_LINE = ("contender", "number", "scope", "text", "verdict", "numbers")


def _entries(field: Field) -> list[table.Row]:
    """One row per entry."""
    out = []
    for cell in field.cells:
        for contender, entry in sorted(field.entries[cell].items()):
            row: table.Row = {name: getattr(cell.setting, name) for name in SETTING}
            row |= {"noise_multiplier": cell.noise_multiplier, "epsilon": field.epsilon(cell)}
            row |= {"epsilon_tempered": field.total(cell), "method": contender.method, "lr": entry.lr}
            row |= {"default": int(contender.default), "variant": contender.variant, "chosen": entry.chosen}
            row |= {"candidates": entry.candidates, "runs": len(entry.rows)}
            row |= {"validation_accuracy": entry.validation.accuracy if entry.validation else None}
            row |= {"diverged": len(entry.diverged), "missing": len(entry.missing)}
            for kind in (MEAN, RAW, TEMPERED):
                for measure in _MEASURES:
                    if (v := field.summary(entry, kind, measure)) is not None:
                        row |= {f"{kind}_{measure}": v.mean, f"{kind}_{measure}_std": v.std}
            out.append(row)
    return out


def _lines(judged: dict[Contender, list[Bar]]) -> list[table.Row]:
    return [{"contender": contender.title, **vars(bar)} for contender, bars in judged.items() for bar in bars]
