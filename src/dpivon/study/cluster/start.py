"""The Ray cluster that a study runs on: one that is there, or one on this machine for as long as the study runs."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dpivon.errors import DpivonError, bad, need
from dpivon.study.run.settings import Cluster

_ROOM = 256 * 2**20  # of the object store, beside the data


def ray_module(cluster: Cluster) -> Any:
    """Ray, or an error with the line that installs it. What it reads from the environment, it reads when it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no network request
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what it will do by itself, and warns about
    if _address(cluster) is None:  # a cluster of one machine listens on loopback alone: this is how Ray calls it
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # 15 otherwise: a busy machine would starve it
    return need("ray", "ray")


def _address(cluster: Cluster) -> str | None:
    return cluster.address or os.environ.get("RAY_ADDRESS")


@contextmanager
def connected(cluster: Cluster, data_bytes: int) -> Iterator[Any]:
    """Ray, connected. What was connected before stays so; what is started here is stopped."""
    address = _address(cluster)
    if address is not None and address.startswith("ray://"):
        fix = "Run the command on a node of the cluster (`ray job submit`, or a shell there) with --address auto"
        raise bad("address", address, "is Ray Client's, from outside the cluster", fix)
    ray = ray_module(cluster)
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "dpivon"}
    if address is None:
        options |= {"num_cpus": cluster.workers, "object_store_memory": _ROOM + 2 * data_bytes}
        options |= {"include_dashboard": False}
    else:
        options["address"] = address
    with _own_signals():
        try:
            ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            if address is None:
                raise DpivonError(f"Ray cannot be started on this machine ({error}). Use the local engine.") from error
            fix = "Give the address that `ray start --head` printed, or auto on a node of the cluster"
            raise bad("address", address, f"no Ray cluster answers there ({error})", fix) from error
    try:
        yield ray
    finally:
        with _own_signals():
            ray.shutdown()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray replaces the process's handlers; put back those that were there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            with contextlib.suppress(TypeError):  # a handler that was not installed from Python
                signal.signal(number, handler)
