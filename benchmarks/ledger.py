"""A million releases in a ledger: how large the file is, how long ε takes, and what a charge costs a step.

    python -m benchmarks.ledger --json tests/reliability/load.json

One by one as the engine charges them (with evidence), and in blocks of 32 as a captured loop does. The million is written to
memory (/dev/shm) where there is one, since a disk's sync is what a charge costs and would be timed a million times;
it is timed a thousand times on the disk of ``--disk``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

from dpivon.durable.ledger import Ledger, read
from dpivon.privacy.accounting import epsilon
from dpivon.privacy.accounting.recorded import history
from dpivon.privacy.mechanism import NoiseSpec

SPEC = NoiseSpec(1.0, 1.0, 512.0, 512 / 50_000)
DELTA = 1e-5


def write(path: Path, releases: int, block: int) -> dict:
    ledger, largest, began = Ledger(path), 0, time.perf_counter()
    for i in range(releases // block):
        ledger.charge((SPEC.terms,), block, f"{i:032x}" if block == 1 else "")
        if i % 256 == 0:
            largest = max(largest, path.stat().st_size)
    took = time.perf_counter() - began
    ledger.close()
    return {
        "releases": releases,
        "block": block,
        "bytes": path.stat().st_size,
        "largest_bytes": largest,
        "seconds": took,
    }


def account(path: Path) -> dict:
    began = time.perf_counter()
    rows = history(read(path), 0)
    out = {"rows": len(rows), "read_seconds": time.perf_counter() - began}
    for name in ("rdp", "pld", "prv"):
        times = []
        for _ in range(3):
            began = time.perf_counter()
            value = epsilon(rows, DELTA, name)
            times.append(time.perf_counter() - began)
        out[name] = {"epsilon": value, "first_seconds": times[0], "seconds": statistics.median(times)}
    return out


def sync(disk: Path) -> dict:
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        ledger, times = Ledger(Path(folder) / "ledger.jsonl"), []
        for i in range(1000):
            began = time.perf_counter()
            ledger.charge((SPEC.terms,), 1, f"{i:032x}")
            times.append(time.perf_counter() - began)
        ledger.close()
    return {"charges": 1000, "median_ms": 1e3 * statistics.median(times), "worst_ms": 1e3 * max(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--releases", type=int, default=1_000_000)
    parser.add_argument("--disk", type=Path, default=Path())
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    memory = Path("/dev/shm")
    report: dict = {
        "command": f"python -m benchmarks.ledger --releases {given.releases}",
        "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "ledgers": [],
    }
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        for block in (32, 1):
            path = Path(folder) / f"{block}.jsonl"
            written = write(path, given.releases, block)
            report["ledgers"].append(written | {"accounting": account(path)})
            print(json.dumps(report["ledgers"][-1]), flush=True)
    report["one_charge_on_this_disk"] = sync(given.disk)
    print(json.dumps(report["one_charge_on_this_disk"]))
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
