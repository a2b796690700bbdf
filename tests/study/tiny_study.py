"""A study of three small runs on digits, and a machine that has torch, numpy and safetensors alone."""

from __future__ import annotations

from dpivon.study.plan.plan import Plan, PlannedRun
from dpivon.study.results import table
from dpivon.study.run.settings import Settings

STEPS = 24  # an epoch of 1,497 digits at b = 64
PLAN = Plan(
    name="tiny",
    dataset="digits",
    network="small",
    split="final",
    epochs=1,
    delta=1e-4,
    mc_samples=2,
    seed=0,
    runs=(
        PlannedRun("dp-sgd", 64, 1.0, 1.0, 0, 0.5),
        PlannedRun("dp-ivon-gradsq", 64, 1.0, 1.0, 0, 0.5),
        PlannedRun("dp-adam", 128, 2.0, 1.0, 0, 0.01),
    ),
)
FAST = Settings(quiet=True, block=4, device="cpu")
UNLIKE = {"epsilon", "releases", "seconds"}  # what being killed may change


def compare(out, whole, *, exact):
    ours, theirs = (sorted(table.read(o / "runs.csv"), key=lambda r: r["id"]) for o in (out, whole))
    assert [r["id"] for r in ours] == [r["id"] for r in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert {k: v for k, v in a.items() if k not in UNLIKE} == {k: v for k, v in b.items() if k not in UNLIKE}
        assert a["epsilon"] == b["epsilon"] if exact else a["epsilon"] >= b["epsilon"]
        assert a["releases"] >= a["steps"]
    mine, other = (sorted(map(str, table.read(o / "diagnostics.csv"))) for o in (out, whole))
    assert mine == other


BARE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"yaml", "pydantic", "rich", "typer", "matplotlib", "torchmetrics", "dp_accounting", "PIL"}:
            raise ImportError(name + " is not on this machine")
sys.meta_path.insert(0, Absent())
from pathlib import Path
from dpivon.study.plan.plan import read_plan
from dpivon.study.run.runner import run_study
from dpivon.study.run.settings import Settings
plan, out, block = read_plan(Path(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3])
outcome = run_study(plan, out, Settings(device="cpu", block=block, checkpoint_seconds=float(sys.argv[4]), quiet=True))
print(*outcome.lines(out / plan.table), sep="\\n")
raise SystemExit(outcome.exit_code)
"""
