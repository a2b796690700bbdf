"""The ledger: an append-only record of what was released, on disk before it is released. ε is computed from it.

A file of JSON lines, chained: ``sum`` is a digest of the line itself and of the ``sum`` before it.

    {"dpivon_ledger": 2, "id": "…", "sum": "…"}                 which ledger this is
    {"terms": [{"run": "…", "noise_multiplier": σ, …}, …], …}   what a release of the following lines is, one entry per run
    {"to": 32, "n": 32, "sum": "…"}                             32 releases of each run, 32 so far
    {"to": 33, "n": 1, "evidence": "…", "sum": "…"}             one, and a keyed digest of what it was made of
    {"to": 30, "n": -3, "sum": "…"}                             three that were reserved were never launched

A line is written and synced, then come its releases: a crash in between has paid for something that was never seen. Equal
lines are merged when there are thousands of them, so a ledger stays small however long the run. A last line that the
crash tore is charged as if it had been the largest line of its kind. Anything else that does not fit is an error.

An entry names its run where the ledger is of several; a ledger of version 1 never does. A run that started from an earlier one
has the releases of that run first, each with its id as ``earlier``. :data:`PROVES` and :data:`PROVES_NOT` say what the chain is
good for.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpivon.durable.files import Lock, replace
from dpivon.errors import PrivacyError, StorageError

Terms = tuple[Mapping[str, Any], ...]
VERSION = 2
MOST_LINES, KEPT_EVIDENCE = 4096, 1024
PROVES = (
    "every line follows from the line before it, so no line was changed, removed, inserted or reordered by accident, or by an "
    "edit that left the digests as they were."
)
PROVES_NOT = (
    "there is no secret key, so whoever rewrites the whole file can compute every digest anew; nor are lines seen that were "
    "cut off the end. The last digest of a finished run, noted elsewhere, shows both."
)
_SEAL = b',"sum":"'


@dataclass
class Record:
    """What a ledger says: releases by their terms, in order and run-length, and the evidence of the last of them."""

    id: str
    rows: list[tuple[Terms, int]] = field(default_factory=list)
    evidence: dict[int, str] = field(default_factory=dict)
    torn: bool = False
    releases: int = 0  # of each run
    head: str = ""  # the digest of the last line that was read

    @property
    def runs(self) -> int:
        return len(self.rows[-1][0]) if self.rows else 0

    @property
    def names(self) -> tuple[str, ...]:
        """Whose releases they are, in the order of the terms; empty where not recorded."""
        return next((found for terms, _ in reversed(self.rows) if (found := names(terms))), ())

    @property
    def earlier(self) -> int:
        """How many of the releases are of earlier runs that this one started from."""
        return sum(n for terms, n in self.rows if any("earlier" in own for own in terms))

    @property
    def unit(self) -> str:
        """Whose contribution its releases bound: a person's, by what says who that is, or empty for an example's."""
        return unit(self.rows[-1][0]) if self.rows else ""

    def counts(self) -> dict[str, int]:
        """Releases by the digest of their terms."""
        found: dict[str, int] = {}
        for terms, n in self.rows:
            key = digest(terms)
            found[key] = found.get(key, 0) + n
        return found

    def terms_at(self, release: int) -> Terms | None:
        """The terms of release number ``release``."""
        for terms, n in self.rows:
            if release < n:
                return terms
            release -= n
        return None

    def note(self, terms: Terms, n: int, evidence: str = "") -> None:
        """Releases to come, with the evidence of the first of them; of evidence the last is kept."""
        if evidence:
            self.evidence[self.releases] = evidence
            while len(self.evidence) > KEPT_EVIDENCE:
                del self.evidence[next(iter(self.evidence))]
        self.add(terms, n)

    def add(self, terms: Terms, n: int) -> None:
        self.releases += n
        if self.rows and self.rows[-1][0] == terms:
            self.rows[-1] = (terms, self.rows[-1][1] + n)
        else:
            self.rows.append((terms, n))


def names(terms: Terms) -> tuple[str, ...]:
    """The runs that terms name, all of them or none."""
    found = tuple(str(own["run"]) for own in terms if "run" in own)
    if found and len(set(found)) != len(terms):
        raise ValueError("it names some of its runs, or one of them twice")
    return found


def unit(terms: Terms) -> str:
    """Whose contribution is bounded; one for all runs."""
    found = {str(own.get("unit", "")) for own in terms}
    if len(found) > 1:
        raise ValueError("its runs have different units of privacy")
    return found.pop() if found else ""


def digest(terms: Terms) -> str:
    return hashlib.sha256(_json(list(map(dict, terms)))).hexdigest()[:16]


class Ledger:
    """A ledger open for charging. One process at a time: a second is refused. A new one begins with the rows ``earlier``.

    >>> ledger = Ledger(folder / "ledger.jsonl")
    >>> ledger.charge(({"noise_multiplier": 1.0, "sample_rate": 0.01, …},), 32)  # on disk when this returns

    Attributes:
        ahead: how many releases are written at once. Those not made yet stay charged if the process dies, and are given back
            when it closes the ledger.
    """

    ahead = 1

    def __init__(self, path: str | os.PathLike[str], earlier: Sequence[tuple[Terms, int]] = ()) -> None:
        self.path, self._file, self._process = Path(path), -1, os.getpid()
        self._spare = 0  # releases on disk that are not in the record, since they were not made yet
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = Lock(self.path.with_name(self.path.name + ".lock"), str(self.path))
        try:
            self._open(earlier)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, earlier: Sequence[tuple[Terms, int]]) -> None:
        if not self.path.exists():
            self.record, self._largest = Record(secrets.token_hex(8), list(earlier)), 1
            content, _ = _sealed(self._lines_of_record(), "")
            replace(self.path, content)
        self._reopen()
        if self.record.torn:
            self._truncate()
            if self._terms is not None:
                self.charge(self._terms, self._largest)

    def _reopen(self) -> None:
        read = _parse(self.path)
        self.record, self._terms, self._largest = read.record, read.terms, read.largest
        self._seal, self._lines, self._end, self._spare = read.seal, read.lines, read.end, 0
        self._merge_at = max(
            MOST_LINES, 2 * self._lines
        )  # terms that never repeat cannot be merged: not again and again
        if self._file >= 0:
            os.close(self._file)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)

    def charge(self, terms: Terms, n: int = 1, evidence: str = "") -> None:
        """Record n releases of every run; when this returns they are on disk and may be made."""
        if self.record.rows and len(terms) != self.record.runs:
            raise PrivacyError(
                f"{self.path}: is of {self.record.runs} runs, not of {len(terms)}. Give each its own ledger."
            )
        if (ours := names(terms)) and self.record.names not in ((), ours):
            raise PrivacyError(
                f"{self.path}: is of other runs, or of these in another order. Give each its own ledger."
            )
        if self.record.rows and (own := unit(terms)) != self.record.unit:
            theirs, own = (name or "the example" for name in (self.record.unit, own))
            raise PrivacyError(
                f"{self.path}: is of releases for the unit of privacy {theirs!r}, not {own!r}. Give each its own ledger."
            )
        if self._spare >= n and terms == self._terms and not evidence:
            self._check_own()
            self._spare -= n
            self.record.note(terms, n, evidence)
            return
        self._return_spare()
        at, more = self.record.releases, 0 if evidence else max(0, self.ahead - n)
        lines: list[dict[str, Any]] = []
        if terms != self._terms:
            lines.append({"terms": [dict(t) for t in terms]})
            self._largest = 1
        lines.append({"to": at + n + more, "n": n + more} | ({"evidence": evidence} if evidence else {}))
        self._append(lines)
        self._terms, self._largest, self._spare = terms, max(self._largest, n + more), more
        self.record.note(terms, n, evidence)
        self._merge()

    def give_back(self, n: int) -> None:
        """The last n were reserved and never launched, and this process knows it: it stops in good order."""
        if n == 0:
            return
        if not self.record.rows or not 0 < n <= self.record.rows[-1][1]:
            raise PrivacyError(f"{self.path}: {n} releases cannot be given back; so many were not reserved last.")
        self._return_spare()
        self._append([{"to": self.record.releases - n, "n": -n}])
        self.record.add(self.record.rows[-1][0], -n)

    def _return_spare(self) -> None:
        spare, self._spare = self._spare, 0  # first: if it cannot be written, they stay charged and are not made
        if spare:
            self._append([{"to": self.record.releases, "n": -spare}])

    def close(self) -> None:
        """Let another process charge it. What was charged stays, but for what was written ahead."""
        if self._file >= 0:
            with contextlib.suppress(PrivacyError, StorageError):  # it stays charged
                self._return_spare()
            os.close(self._file)
            self._file = -1
        self._lock.release()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self.close()

    def __reduce__(self) -> Any:
        raise PrivacyError(
            f"{self.path}: an open ledger cannot be copied or pickled: two would make the releases that one has charged. "
            "Give the copy its own ledger."
        )

    def _check_own(self) -> None:
        """Refuse to charge from a fork, after closing, or where the path is another file by now."""
        if os.getpid() != self._process:
            raise PrivacyError(
                f"{self.path}: was opened by process {self._process}, and this is its fork {os.getpid()}, so nothing was "
                "released: two processes cannot charge one ledger. Make the run in the process that trains it."
            )
        if self._file < 0:
            fix = "Attach it to a new PrivacyEngine(ledger=…)"
            raise PrivacyError(f"{self.path}: was closed, so nothing was released. {fix} to go on.")
        try:
            here, there = os.fstat(self._file), os.stat(self.path)
            if (here.st_ino, here.st_dev) != (there.st_ino, there.st_dev):
                raise OSError("it was replaced by another file")
        except OSError as error:
            raise self._not_written(error) from error

    def _not_written(self, error: OSError) -> StorageError:
        return StorageError(
            f"{self.path}: the charge cannot be written ({error}), so nothing was released. Make room and resume."
        )

    def _append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self._check_own()
        content, seal = _sealed(lines, self._seal)
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._truncate()
            raise self._not_written(error) from error
        self._seal, self._lines, self._end = seal, self._lines + len(lines), self._end + len(content)

    def _truncate(self) -> None:
        os.ftruncate(self._file, self._end)
        os.fsync(self._file)

    def _merge(self) -> None:
        """Once in a few thousand lines: the same record in as few as it takes."""
        if self._lines <= self._merge_at:
            return
        content, _ = _sealed(self._lines_of_record(), "")
        with contextlib.suppress(StorageError):  # the long file is as good
            replace(self.path, content)
        self._reopen()

    def _lines_of_record(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = [{"dpivon_ledger": VERSION, "id": self.record.id}]
        to = 0
        for terms, n in self.record.rows:
            to += n
            lines += [{"terms": [dict(t) for t in terms]}, {"to": to, "n": n, "block": self._largest}]
        return lines + [{"at": at, "evidence": e} for at, e in self.record.evidence.items()]


def read(path: Path) -> Record:
    """What a ledger says, without opening it for charging. A torn last line is counted as it will be."""
    found = _parse(path)
    if found.record.torn and found.terms is not None:
        found.record.add(found.terms, found.largest)
    return found.record


@dataclass
class _Parsed:
    record: Record
    terms: Terms | None = None  # of the lines to come
    seal: str = ""
    lines: int = 0
    end: int = 0  # of the last whole line
    largest: int = 1  # releases that one line of these terms reserved at most


def _parse(path: Path) -> _Parsed:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise PrivacyError(f"{path}: cannot be read ({error}), so what was released is unknown. {_FIX}") from None
    torn = lines.pop() != b""
    parsed = _Parsed(Record("", torn=torn))
    for line in lines:
        parsed.lines += 1
        parsed.end += len(line) + 1
        try:
            body, found = line.rsplit(_SEAL, 1)
            body += b"}"
            parsed.seal = _seal(parsed.seal, body)
            if found != f'{parsed.seal}"}}'.encode():
                raise ValueError("its checksum does not match")
            _take(json.loads(body), parsed)
        except (ValueError, KeyError, TypeError) as error:
            raise PrivacyError(f"{path}, line {parsed.lines}: was changed or damaged ({error}). {_FIX}") from None
    parsed.record.head = parsed.seal
    if not lines:
        raise PrivacyError(f"{path}: has not one whole line, so what was released is unknown. {_FIX}")
    return parsed


def _take(line: Mapping[str, Any], parsed: _Parsed) -> None:
    record = parsed.record
    if parsed.lines == 1:
        if line["dpivon_ledger"] not in (1, VERSION):
            raise ValueError("it is of another version of dpivon")
        record.id = str(line["id"])
    elif "terms" in line:
        parsed.terms, parsed.largest = tuple(line["terms"]), 1
        if record.rows and len(parsed.terms) != record.runs:
            raise ValueError("its number of runs changes")
        if (found := names(parsed.terms)) and record.names not in ((), found):
            raise ValueError("its runs change")
        if record.rows and unit(parsed.terms) != record.unit:
            raise ValueError("its unit of privacy changes")
    elif "at" in line:
        record.evidence[int(line["at"])] = str(line["evidence"])
    else:
        n, at = int(line["n"]), record.releases
        last = record.rows[-1][1] if record.rows and record.rows[-1][0] == parsed.terms else 0
        if parsed.terms is None or n < -last or at + n != line["to"]:
            raise ValueError("its count does not follow from the line before")
        if "evidence" in line:
            record.evidence[at] = str(line["evidence"])
        record.add(parsed.terms, n)
        parsed.largest = max(parsed.largest, int(line.get("block", n)))


_FIX = (
    "Put back a copy of it that is newer than every release; without one, count by hand what was released, and begin "
    "again in another folder."
)


def _sealed(lines: Sequence[Mapping[str, Any]], seal: str) -> tuple[bytes, str]:
    parts = []
    for line in lines:
        body = _json(line)
        seal = _seal(seal, body)
        parts.append(body[:-1] + _SEAL + f'{seal}"}}\n'.encode())
    return b"".join(parts), seal


def _seal(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()[:16]


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode()
