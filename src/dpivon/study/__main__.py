"""``python -m dpivon.study``: running on a machine that has torch, numpy and safetensors and little else."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from dpivon.errors import DpivonError
from dpivon.study.engines import ENGINES, run_with
from dpivon.study.plan import read_plan
from dpivon.study.settings import PRECISIONS, Cluster, Settings
from dpivon.study.status import status_lines
from dpivon.terminal import say


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dpivon.study", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a resolved plan (.json)")
    run.add_argument("plan", type=Path)
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--data", type=Path, default=Path("data"))
    run.add_argument("--device")
    run.add_argument("--stack", type=int)
    run.add_argument("--precision", choices=list(PRECISIONS))
    run.add_argument("--minutes", type=float)
    run.add_argument("--checkpoint-seconds", type=float, default=60.0)
    run.add_argument("--block", type=int, default=32)
    run.add_argument("--keep", action="store_true")
    run.add_argument("--quiet", action="store_true")
    run.add_argument("--only", default="", help="runs with this in their id, such as b512-")
    run.add_argument("--engine", choices=ENGINES, default="local", help="ray: on a Ray cluster")
    run.add_argument("--address", help="of the Ray cluster; without it one is started on this machine")
    run.add_argument("--workers", type=int, help="stacks at once, on Ray")
    run.add_argument("--gpus-per-stack", type=float, help="the share of a GPU that a stack takes, on Ray")
    run.add_argument("--retries", type=int, help="new attempts at a stack that fails, on Ray")
    run.add_argument("--hung-after", type=float, help="seconds of silence after which a worker is ended, on Ray")
    run.add_argument("--scratch", type=Path, help="folder on the workers' own disks, where they do not see --out")
    status = commands.add_parser("status", help="what is finished and what is under way")
    status.add_argument("out", type=Path)
    given = vars(parser.parse_args(arguments))
    try:
        command = given.pop("command")
        if command == "status":
            for line in status_lines(given["out"]):
                say(line)
            return 0
        plan, out = read_plan(given.pop("plan")), given.pop("out")
        engine, cluster = given.pop("engine"), Cluster(**{f.name: given.pop(f.name) for f in fields(Cluster)})
        outcome = run_with(engine, plan, out, Settings(**given), cluster)
    except DpivonError as error:
        say(f"error: {' '.join(str(error).split())}", err=True)
        return 2
    for line in outcome.lines(out / plan.table):
        say(line)
    return outcome.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
