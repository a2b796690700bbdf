"""The Ray engine in processes of its own: interrupted, its driver killed, a node of a cluster taken away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from clusters import LONG, caught, charged
from test_ray import FAST, rows_of, same

from dpivon.durable.ledger import read
from dpivon.study.plan.plan import Plan
from dpivon.study.results.folder import status_lines
from dpivon.study.run.runner import run_study, run_with
from dpivon.study.run.settings import Cluster

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
LONGER = Plan(**{**vars(LONG), "epochs": 10})


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    out = tmp_path_factory.mktemp("local")
    torch.set_num_threads(1)
    assert run_study(LONGER, out, FAST).finished == 3
    return rows_of(out)


@pytest.fixture
def command(tmp_path):
    pytest.importorskip("ray")
    LONGER.write(tmp_path / "plan.json")
    given = [sys.executable, "-m", "dpivon", "study", "run", f"{tmp_path}/plan.json", "--out", f"{tmp_path}/out"]
    return [
        *given,
        "--engine",
        "ray",
        "--workers",
        "2",
        "--device",
        "cpu",
        "--block",
        "4",
        "--checkpoint-seconds",
        "0.2",
    ]


def begin(command):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    # a group of its own, as a terminal makes it: Ctrl-C goes to the driver and to all that it has started
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for(process, condition):
    deadline = time.monotonic() + 180
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def descendants(group):
    """Processes that are left of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == group and fields[0] != "Z":
            found.append(int(stat.parts[2]))
    return found


def equal(out, local):
    rows = rows_of(out)
    assert rows.keys() == local.keys()
    for name, row in rows.items():
        assert same(row, local[name])
        assert row["epsilon"] == local[name]["epsilon"]


def test_an_interrupt_is_clean_and_a_killed_driver_repeats_nothing(command, tmp_path, local):
    out = tmp_path / "out"
    process = begin(command)
    wait_for(process, lambda: any(charged(f) >= 8 for f in out.glob("stacks/*")))
    os.killpg(process.pid, signal.SIGINT)
    words, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "of 3 runs finished" in words
    assert "Traceback" not in errors
    assert not descendants(process.pid)
    assert not (out / ".cluster").exists()
    assert "under way" in "\n".join(status_lines(out))
    for folder in out.glob("stacks/*"):  # what is charged was made and is in the checkpoint: nothing was lost
        newest = max(folder.glob("release-*.safetensors"), default=None)
        assert newest is None or int(newest.stem.split("-")[1]) == charged(folder)

    process = begin(command)
    wait_for(process, lambda: (out / "runs.csv").exists())
    process.kill()
    process.communicate()
    before = rows_of(out)
    assert 1 <= len(before) < 3

    done = begin(command)
    words, errors = done.communicate(timeout=240)
    assert done.returncode == 0, errors
    assert "3 of 3 runs finished" in words
    equal(out, local)
    after = rows_of(out)
    assert all(after[name] == row for name, row in before.items())  # even the seconds: not trained again


class Taker(threading.Thread):
    """Takes a node away, without a word to anybody, when a worker of it has made some releases."""

    def __init__(self, nodes, node, folders, *, after: int) -> None:
        super().__init__(daemon=True)
        self.nodes, self.node, self.folders, self.after = nodes, node, folders, after
        self.raylet = node.all_processes["raylet"][0].process.pid
        self.taken = False
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            for folder in self.folders():
                with caught(folder, self.after) as worker:
                    if worker is not None and parent(worker) == self.raylet:
                        self.nodes.remove_node(self.node, allow_graceful=False)
                        os.kill(worker, signal.SIGKILL)  # it was stopped, and could not see that its node is gone
                        self.taken = True
                        return
            time.sleep(0.01)


def parent(process):
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


@pytest.mark.parametrize("shared", [True, False])
def test_a_node_is_taken_away(tmp_path, local, shared):
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster as Nodes

    small = {"object_store_memory": 80 * 2**20}
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False} | small)
    lost = nodes.add_node(num_cpus=2, **small)
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    try:
        ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
        taker = Taker(nodes, lost, lambda: out.glob("stacks/*") if shared else scratch.glob("dpivon-*"), after=20)
        outcome = run_with("ray", LONGER, out, FAST, Cluster(scratch=None if shared else scratch))
    finally:
        ray.shutdown()
        nodes.shutdown()
    assert taker.taken
    assert outcome.exit_code == 0, outcome
    rows = rows_of(out)
    assert rows.keys() == local.keys()
    if shared:
        equal(out, local)
        return
    assert any(row["releases"] > row["steps"] for row in rows.values())
    assert all(row["releases"] >= row["steps"] == local[name]["steps"] for name, row in rows.items())
    ledgers = [read(folder / "ledger.jsonl").releases for folder in (out / "ledgers").iterdir()]
    assert sorted(ledgers) == sorted(row["releases"] for row in rows.values())
