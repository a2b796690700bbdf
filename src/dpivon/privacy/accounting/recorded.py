"""From a ledger on disk to ε."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dpivon.durable.files import read_json
from dpivon.durable.ledger import Record
from dpivon.errors import DpivonError, PrivacyError, bad
from dpivon.privacy.accounting.accountant import ACCOUNTANTS, Accountant, check_delta, epsilon
from dpivon.privacy.accounting.history import History, append, check_entry

LEDGER = "ledger.jsonl"
DELTA = 1e-5  # unless another is given
CONFIG, STUDY = "config.yaml", "study.json"  # beside a run's ledger; above the folders of a study's stacks
STACKS = ("stacks", "ledgers")  # of those under way, and of those that are finished


def replay(record: Record, run: int, accountant: Accountant) -> None:
    """Charge an account with all that a ledger holds of one of its runs."""
    if record.rows:
        accountant.keep_unit(record.unit)
    for sigma, rate, steps, reason in _releases(record, run):
        if reason is not None:
            accountant.record_unaccounted(reason, steps)
        else:
            accountant.charge(noise_multiplier=sigma, sample_rate=rate, steps=steps)


def history(record: Record, run: int, *, earlier: bool | None = None) -> History:
    """Rows (σ, q, steps) of one run; a release without a guarantee is one of σ = 0.

    ``earlier=True`` leaves those of the runs that it started from, and ``earlier=False`` its own.
    """
    rows: History = []  # not those of an account: a ledger is what accounts are checked against
    for sigma, rate, steps, reason in _releases(record, run, earlier):
        append(rows, (sigma, rate, steps) if reason is None else (0.0, 1.0, steps))
    return rows


def _releases(record: Record, run: int, earlier: bool | None = None) -> Iterator[tuple[float, float, int, str | None]]:
    """(σ, q, steps, why unaccounted) of one run, checked."""
    for terms, steps in record.rows:
        own = terms[run]
        if earlier is not None and earlier != ("earlier" in own):
            continue
        try:
            sigma, rate, _ = check_entry(own["noise_multiplier"], own["sample_rate"], 0)
            reason = own["unaccounted"]
        except (DpivonError, KeyError, TypeError) as error:
            raise PrivacyError(
                f"ledger: holds terms that are none of a release ({error}). It was not written by dpivon."
            ) from None
        yield sigma, rate, steps, None if reason is None else str(reason)


def drawn(record: Record, run: int) -> dict[str, int]:
    """Releases of one run by where their noise and batches came from."""
    counts: dict[str, int] = {}
    for terms, n in record.rows:
        own = terms[run]
        key = f"noise {own.get('noise', 'unstated')}, batches {own.get('batches', 'unstated')}"
        counts[key] = counts.get(key, 0) + n
    return counts


def started_from(record: Record, run: int) -> dict[str, int]:
    """Releases by the earlier run that they are of; the last of these runs is the one that this run started from."""
    counts: dict[str, int] = {}
    for terms, n in record.rows:
        if "earlier" in terms[run]:
            key = str(terms[run]["earlier"])
            counts[key] = counts.get(key, 0) + n
    return counts


def seeded(record: Record, run: int) -> int:
    """How many releases of one run can be undone by whoever knows a seed."""
    return sum(n for terms, n in record.rows if str(terms[run].get("noise", "seeded")).startswith("seeded"))


def epsilons(rows: History, delta: float) -> dict[str, float]:
    """ε by every accountant; each is an upper bound, so the least of them holds."""
    return {name: epsilon(rows, delta, name) for name in ACCOUNTANTS}


def own_delta(ledger: Path) -> float | None:
    """δ that a run was planned with, from its configuration or its study's plan; None where the folder has neither."""
    from dpivon.yaml_files import read_yaml  # here, since a machine that runs studies need not have pydantic

    folder, fix = ledger.absolute().parent, "Give --delta"
    config, study = folder / CONFIG, folder.parent.parent / STUDY
    path = config if config.exists() else study
    if not path.exists() or (path == study and folder.parent.name not in STACKS):
        return None
    try:
        raw = read_json("run", path, fix) if path == study else read_yaml("run", path, missing=fix, fix=fix)
        return check_delta(raw["delta"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise bad("run", str(path), f"holds no δ ({error})", fix) from None


def find(run: Path) -> list[Path]:
    """The ledgers of a run: the file itself, or all in a folder and its folders."""
    if run.is_dir():
        return sorted(run.rglob(LEDGER))
    return [run] if run.exists() else []
