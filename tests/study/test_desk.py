"""The desk by itself, without Ray: what is charged for a worker on another machine, and when."""

from __future__ import annotations

import pytest

from dpivon.durable.ledger import Ledger, read
from dpivon.errors import ArgumentError, DpivonError
from dpivon.study.cluster.desk import Desk, Report, Superseded
from dpivon.study.results.folder import Results

TERMS = ({"noise_multiplier": 1.0, "sample_rate": 0.1},)


@pytest.fixture
def desk(tmp_path):
    (tmp_path / "0000").mkdir()
    desk = Desk(tmp_path)
    desk.expect("0000", 1)
    return desk


def releases(tmp_path):
    return read(tmp_path / "0000" / "ledger.jsonl").releases


def test_a_release_is_on_the_drivers_disk_before_a_worker_elsewhere_may_make_it(desk, tmp_path):
    files = desk.files("0000", 1)
    assert list(files) == ["ledger.jsonl"]
    desk.reserve("0000", 1, TERMS, 32)
    assert releases(tmp_path) == 32
    desk.reserve("0000", 1, TERMS, 20)  # already there
    assert releases(tmp_path) == 32
    desk.keep("0000", 1, "release-000000000030.safetensors", b"state", 30)  # two were not made
    assert releases(tmp_path) == 30
    assert (tmp_path / "0000" / "release-000000000030.safetensors").stat().st_mode & 0o777 == 0o600


def test_what_is_lost_with_a_node_stays_charged_and_the_next_attempt_gets_all_that_was_kept(desk, tmp_path):
    desk.files("0000", 1)
    for at in (10, 20, 30):
        desk.reserve("0000", 1, TERMS, at)
        desk.keep("0000", 1, f"release-{at:012}.safetensors", b"%d" % at, at)
    desk.reserve("0000", 1, TERMS, 44)
    desk.expect("0000", 2)  # the first is gone
    files = desk.files("0000", 2)
    assert releases(tmp_path) == 44
    assert {k: v for k, v in files.items() if k != "ledger.jsonl"} == {
        "release-000000000030.safetensors": b"30",
        "release-000000000020.safetensors": b"20",
    }
    assert files["ledger.jsonl"] == (tmp_path / "0000" / "ledger.jsonl").read_bytes()


def test_an_attempt_that_was_given_up_can_change_nothing(desk, tmp_path):
    desk.files("0000", 1)
    desk.reserve("0000", 1, TERMS, 8)
    desk.expect("0000", 2)
    for late in (
        lambda: desk.begin("0000", Report(1)),
        lambda: desk.files("0000", 1),
        lambda: desk.reserve("0000", 1, TERMS, 100),
        lambda: desk.keep("0000", 1, "release-000000000008.safetensors", b"old", 8),
        lambda: desk.deliver("0000", 1, Results([{"id": "late"}], [])),
    ):
        with pytest.raises(Superseded, match="attempt 1 was given up"):
            late()
    assert desk.report("0000", Report(1, words="still here")) is False
    assert desk.poll() == {}
    assert desk.collect() == []
    assert releases(tmp_path) == 8
    assert not list((tmp_path / "0000").glob("release-*"))


def test_a_worker_that_sees_the_folder_keeps_its_own_ledger(desk, tmp_path):
    with_it = Ledger(tmp_path / "0000" / "ledger.jsonl")
    desk.reserve("0000", 1, TERMS, 32)  # a fence, and no second charge
    assert with_it.record.releases == 0
    with pytest.raises(DpivonError, match="another process"):
        desk.files("0000", 1)
    with_it.close()


def test_the_ledger_is_let_go_when_an_attempt_ends(desk, tmp_path):
    desk.files("0000", 1)
    desk.forget("0000")
    Ledger(tmp_path / "0000" / "ledger.jsonl").close()


def test_rows_are_collected_once_and_outlive_the_attempt_that_delivered_them(desk):
    first, second = (Results([{"id": name}], []) for name in "ab")
    desk.deliver("0000", 1, first)
    desk.expect("0000", 2)  # the first is lost
    desk.deliver("0000", 2, second)
    assert desk.collect() == [first, second]
    assert desk.collect() == []


def test_a_checkpoints_name_cannot_leave_the_folder(desk):
    desk.files("0000", 1)
    for name in ("../release-1.safetensors", "runs.json", "release-/../../x.safetensors"):
        with pytest.raises(ArgumentError, match="is no checkpoint's"):
            desk.keep("0000", 1, name, b"", 0)


def test_stopping_is_told_to_all(desk):
    assert desk.begin("0000", Report(1)) is True
    assert desk.report("0000", Report(1, words="a")) is True
    assert desk.reserve("0000", 1, TERMS, 4) is True
    desk.stop()
    assert desk.reserve("0000", 1, TERMS, 8) is False
    assert desk.report("0000", Report(1, words="b")) is False
    assert desk.poll()["0000"].words == "b"
    desk.expect("0001", 1)
    assert desk.begin("0001", Report(1)) is False
