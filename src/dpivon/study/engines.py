"""Which engine runs a study: this process, or a Ray cluster."""

from __future__ import annotations

from pathlib import Path

from dpivon.errors import bad, check_choice
from dpivon.study.plan import Plan
from dpivon.study.runner import run_study
from dpivon.study.settings import Cluster, Outcome, Settings

ENGINES = ("local", "ray")


def run_with(engine: str, plan: Plan, out: Path, settings: Settings, cluster: Cluster) -> Outcome:
    """Run a plan; Ray is imported only if it was asked for."""
    check_choice("engine", engine, ENGINES, "Name an engine")
    if engine == "ray":
        from dpivon.study.cluster.engine import run_on_ray

        return run_on_ray(plan, out, settings, cluster)
    for name, value in vars(cluster).items():
        if value is not None:
            raise bad(name, value, "means nothing to the local engine", "Add --engine ray, or leave it out")
    return run_study(plan, out, settings)
