"""The ledger: small, sealed, and never short of a release."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from resumable import Run
from torch.utils.data import DataLoader, TensorDataset

from dpivon import PrivacyEngine, StorageError
from dpivon.durable import ledger as module
from dpivon.durable.files import replace
from dpivon.durable.ledger import Ledger, read
from dpivon.errors import DpivonError, PrivacyError
from dpivon.privacy.accounting import epsilon
from dpivon.privacy.accounting.history import merged
from dpivon.privacy.accounting.recorded import history
from dpivon.privacy.mechanism import NoiseSpec

SPEC = NoiseSpec(1.0, 1.0, 10.0, 0.01)
TERMS = (SPEC.terms,)
OTHER = (SPEC.replace(noise_multiplier=2.0).terms,)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


def written(path, n=5, terms=TERMS):
    ledger = Ledger(path)
    for i in range(n):
        ledger.charge(terms, 1, f"{i:032x}")
    ledger.close()
    return path.read_bytes()


def test_what_is_charged_is_read_back_in_order_and_run_length(path):
    ledger = Ledger(path)
    for terms, n in ((TERMS, 3), (TERMS, 1), (OTHER, 2), (TERMS, 4)):
        ledger.charge(terms, n)
    found = read(path)
    assert found.rows == ledger.record.rows == [(TERMS, 4), (OTHER, 2), (TERMS, 4)]
    assert found.releases == 10
    assert history(found, 0) == [(1.0, 0.01, 4), (2.0, 0.01, 2), (1.0, 0.01, 4)]
    assert [found.terms_at(i) for i in (0, 3, 4, 5, 6, 10)] == [TERMS, TERMS, OTHER, OTHER, TERMS, None]
    first = json.loads(path.read_text().splitlines()[1])["terms"][0]
    assert first | {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.01, "spec": SPEC.digest} == first


def test_what_is_written_ahead_is_never_short_of_what_was_charged_and_is_given_back(path, monkeypatch):
    writes = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (writes.append(file), sync(file)))
    ledger = Ledger(path)
    ledger.ahead, before = 4, len(writes)
    for made in range(1, 7):
        ledger.charge(TERMS)
        assert ledger.record.releases == made
        assert read(path).releases == {1: 4, 5: 8}.get(made, 4 if made < 5 else 8)  # what a crash would leave
    assert len(writes) - before == 2
    ledger.charge(OTHER)  # the two that were not made come back first
    assert read(path).rows == [(TERMS, 6), (OTHER, 4)]
    ledger.charge(OTHER, 1, "e" * 32)  # with evidence one is one
    assert read(path).rows == [(TERMS, 6), (OTHER, 2)]
    ledger.charge(OTHER)
    ledger.close()
    assert read(path).rows == ledger.record.rows == [(TERMS, 6), (OTHER, 3)]
    again = Ledger(path)
    assert again.record.releases == 9
    again.close()


@pytest.mark.parametrize("who", ["a fork", "after closing", "another file"])
def test_what_is_written_ahead_serves_only_the_process_that_wrote_it(path, monkeypatch, who):
    ledger = Ledger(path)
    ledger.ahead = 4
    ledger.charge(TERMS)
    if who == "a fork":
        own = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: own + 1)
    elif who == "after closing":
        monkeypatch.setattr(ledger, "_append", lambda lines: (_ for _ in ()).throw(StorageError("full")))
        ledger.close()
        monkeypatch.undo()
        assert read(path).releases == 4  # what could not be given back stays charged
    else:
        copied = path.with_name("copy")
        copied.write_bytes(path.read_bytes())
        copied.replace(path)
    with pytest.raises((PrivacyError, StorageError), match="nothing was released"):
        ledger.charge(TERMS)
    assert ledger.record.releases == 1
    monkeypatch.undo()


def test_a_ledger_cannot_be_copied_with_what_is_written_ahead(path):
    ledger = Ledger(path)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(PrivacyError, match="cannot be copied"):
            duplicate(ledger)
    ledger.close()


def named(*runs):
    return tuple({"run": run, **SPEC.replace(noise_multiplier=sigma).terms} for run, sigma in runs)


def test_a_ledger_names_its_runs_and_no_others_are_charged_to_it(path):
    ledger = Ledger(path)
    ledger.charge(named(("a", 1.0), ("b", 2.0)), 3)
    ledger.charge(named(("a", 3.0), ("b", 3.0)), 1)
    assert read(path).names == ("a", "b")
    assert history(read(path), read(path).names.index("b")) == [(2.0, 0.01, 3), (3.0, 0.01, 1)]
    before = path.read_bytes()
    for others in (("b", "a"), ("a", "c")):
        with pytest.raises(PrivacyError, match="other runs, or of these in another order"):
            ledger.charge(named(*((run, 1.0) for run in others)), 1)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "terms", [named(("b", 2.0), ("a", 1.0)), (named(("a", 1.0))[0], OTHER[0]), named(("a", 1.0), ("a", 1.0))]
)
def test_a_file_whose_runs_change_their_names_is_refused(path, terms):
    Ledger(path).charge(named(("a", 1.0), ("b", 2.0)), 3)
    added, _ = module._sealed([{"terms": list(terms)}, {"to": 4, "n": 1}], read(path).head)
    path.write_bytes(path.read_bytes() + added)
    with pytest.raises(PrivacyError, match="line 4: was changed or damaged"):
        read(path)


def test_a_ledger_of_version_1_is_read_and_gone_on_with(path):
    lines = [{"dpivon_ledger": 1, "id": "old"}, {"terms": [TERMS[0], OTHER[0]]}, {"to": 5, "n": 5}]
    path.write_bytes(module._sealed(lines, "")[0])
    assert (read(path).releases, read(path).names) == (5, ())
    ledger = Ledger(path)
    ledger.charge(named(("a", 1.0), ("b", 2.0)), 2)
    found = read(path)
    assert (found.id, found.releases, found.names) == ("old", 7, ("a", "b"))
    assert merged(history(found, 1)) == {(2.0, 0.01): 7}


def test_the_line_is_synced_before_the_charge_returns(path, monkeypatch):
    ledger, synced = Ledger(path), []
    fsync = os.fsync
    monkeypatch.setattr(module.os, "fsync", lambda f: (fsync(f), synced.append(path.stat().st_size)))
    before = path.stat().st_size
    ledger.charge(TERMS, 1)
    assert synced[-1] == path.stat().st_size > before


def test_a_release_is_on_disk_before_its_noise_is_drawn(tmp_path):
    run, seen = Run(tmp_path, "adam"), []
    normal = run.optimizer.noise.normal
    run.optimizer.noise.normal = lambda like, std: (
        seen.append(read(tmp_path / "ledger.jsonl").releases),
        normal(like, std),
    )[1]
    run.train(stop_at=3)
    parameters = len(run.optimizer.params)
    assert seen == [1] * parameters + [2] * parameters + [3] * parameters


@pytest.mark.slow
def test_a_target_goes_on_from_its_ledger_and_stops_where_it_would_have(tmp_path):
    def begin(epochs=2):
        net = torch.nn.Linear(3, 2)
        engine = PrivacyEngine(ledger=tmp_path / "ledger.jsonl")
        made = engine.make_private_with_epsilon(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.randn(20, 3), torch.zeros(20).long()), batch_size=5),
            target_epsilon=2.0,
            target_delta=1e-3,
            epochs=epochs,
            max_grad_norm=1.0,
        )
        return engine, made

    def train(made, steps):
        model, optimizer, loader = made
        while steps:
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                if not (steps := steps - 1):
                    break

    engine, made = begin()
    train(made, 5)
    engine.ledger.close()
    engine, made = begin()
    assert len(engine.accountant) == 5
    train(made, 3)
    assert engine.get_epsilon(1e-3) <= 2.0
    with pytest.raises(PrivacyError, match="nothing was released"):
        train(made, 1)
    assert read(tmp_path / "ledger.jsonl").releases == 8
    engine.ledger.close()
    with pytest.raises(PrivacyError, match="8 releases of another plan"):
        begin(epochs=3)


def test_merging_keeps_every_release_and_the_newest_evidence(path, monkeypatch):
    monkeypatch.setattr(module, "MOST_LINES", 20)
    monkeypatch.setattr(module, "KEPT_EVIDENCE", 5)
    written(path, 137)
    found = read(path)
    assert found.releases == 137
    assert len(path.read_bytes().splitlines()) <= 22
    assert all(found.evidence[i] == f"{i:032x}" for i in range(132, 137))
    again = Ledger(path)
    again.charge(OTHER, 2)
    assert again.record.releases == 139
    assert read(path).rows == [(TERMS, 137), (OTHER, 2)]


def test_terms_that_never_repeat_are_not_rewritten_again_and_again(path, monkeypatch):
    monkeypatch.setattr(module, "MOST_LINES", 10)
    writes = []
    replace = module.replace
    monkeypatch.setattr(module, "replace", lambda *a: (writes.append(1), replace(*a)))
    ledger = Ledger(path)
    for i in range(100):
        ledger.charge((SPEC.replace(noise_multiplier=1.0 + i).terms,), 1)
    assert len(writes) < 8
    assert read(path).releases == 100


def test_a_million_releases_one_by_one_stay_small(path, monkeypatch):
    """In blocks of 100, without the wait for the disk; one by one the file is at its longest 4,096 lines."""
    monkeypatch.setattr(module.os, "fsync", lambda f: None)
    ledger, longest = Ledger(path), 0
    for i in range(10_000):
        ledger.charge(TERMS, 100, f"{i:032x}")
        longest = max(longest, ledger._end)
    assert read(path).releases == 1_000_000
    assert longest < 500_000
    assert epsilon(history(read(path), 0), 1e-5) == epsilon([(1.0, 0.01, 1_000_000)], 1e-5)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_last_line_is_counted_as_the_largest_block(path, cut):
    ledger = Ledger(path)
    ledger.charge(TERMS, 4)
    ledger.charge(TERMS, 1)
    ledger.charge(TERMS, 3)
    ledger.close()
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    path.write_bytes(whole[: -min(cut, len(last) - 1)])
    assert read(path).releases == 5 + 4  # the three of the torn line at least
    again = Ledger(path)
    assert again.record.releases == 9
    again.charge(TERMS, 1)
    assert read(path).releases == 10


def test_terms_torn_off_their_count(path):
    written(path, 2)
    ledger = Ledger(path)
    ledger.charge(OTHER, 8)
    ledger.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])  # new terms, but how many?
    again = Ledger(path)
    again.charge(TERMS, 1)
    assert read(path).rows == [(TERMS, 2), (OTHER, 1), (TERMS, 1)]


def test_every_changed_bit_is_found_or_counted_upwards(path):
    whole = written(path, 4)
    missed, told = [], True
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1 << (at % 8)
        path.write_bytes(changed)
        try:
            if read(path).releases < 4:
                missed.append(at)
        except PrivacyError as error:
            told = told and "Put back a copy" in str(error)
    assert told
    assert not missed


def test_an_edited_sigma_is_found_and_the_line_named(path):
    whole = written(path)
    path.write_bytes(whole.replace(b'"noise_multiplier":1.0', b'"noise_multiplier":9.0'))
    with pytest.raises(PrivacyError, match=r"ledger.jsonl, line 2: was changed or damaged.*Put back a copy"):
        Ledger(path)
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3] + lines[4:]))
    with pytest.raises(PrivacyError, match="line 4"):
        read(path)
    path.write_bytes(b"")
    with pytest.raises(PrivacyError, match="what was released is unknown"):
        Ledger(path)
    path.unlink()
    with pytest.raises(PrivacyError, match="cannot be read"):
        read(path)


def test_a_second_process_is_refused(path):
    ledger = Ledger(path)
    code = "import sys; from dpivon.durable.ledger import Ledger; Ledger(sys.argv[1])"
    second = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert second.returncode != 0
    assert "another process is using it" in second.stderr
    with pytest.raises(DpivonError, match="another process"):
        Ledger(path)
    ledger.close()
    Ledger(path)


def test_a_file_that_may_not_grow_refuses_the_charge_and_keeps_the_rest(path):
    """A limit on the size of files is a full disk for those who write to one."""
    whole = written(path)
    ledger = Ledger(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, hard))
    try:
        with pytest.raises(StorageError, match="nothing was released"):
            ledger.charge(TERMS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == whole
    ledger.charge(TERMS)
    assert read(path).releases == 6


def test_a_ledger_that_was_removed_under_us_is_noticed(path):
    ledger = Ledger(path)
    path.unlink()
    with pytest.raises(StorageError, match="nothing was released"):
        ledger.charge(TERMS)
    path.write_bytes(b"")
    with pytest.raises(StorageError, match="replaced by another file"):
        ledger.charge(TERMS)


def test_stacks_of_another_size_do_not_share_a_ledger(path):
    ledger = Ledger(path)
    ledger.charge(TERMS * 2, 3)
    with pytest.raises(PrivacyError, match="is of 2 runs, not of 3"):
        ledger.charge(TERMS * 3, 1)
    assert [history(read(path), run) for run in (0, 1)] == [[(1.0, 0.01, 3)]] * 2


def test_an_engine_takes_its_ledger_before_the_first_step_and_only_one(path):
    engine = PrivacyEngine(ledger=path)
    with pytest.raises(DpivonError, match=r"has .* already"):
        engine.attach_ledger(path.with_name("other"))
    other = PrivacyEngine()
    other.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    with pytest.raises(DpivonError, match="before the first step"):
        other.attach_ledger(path.with_name("third"))


def test_a_read_only_file_system_is_an_error_in_words(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StorageError, match="Read-only file system"):
        replace(tmp_path / "file", b"content", mode=0o600)
