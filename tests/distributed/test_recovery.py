"""Ranks that are killed, that hang, that are told to stop: the others end with an error, the run goes on, ε never falls."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import pytest
import torch
import trainings
from processes import launch, run

import dpivon
from dpivon.durable.ledger import read
from dpivon.privacy.ranks.group import Group

STEPS, ROUNDING = 9, 2e-6


def fail_in(moment: str, releases: int, how: int) -> None:
    """Stop this process by a signal inside a collective of a release, after so many of them."""
    original, seen = getattr(Group, moment), [0]

    def failing(self: Group, *args: Any) -> Any:
        seen[0] += 1
        if seen[0] == releases:
            os.kill(os.getpid(), how)
        return original(self, *args)

    setattr(Group, moment, failing)


def kept(rank: int, folder: str, steps: int, fault: Any = None, wrapper: Any = None, every: int = 3) -> Any:
    """Train to ``steps`` with a checkpoint now and then. ``fault``: (rank, moment, after how many calls, signal)."""
    engine, model, optimizer, loader = trainings.start(wrap=wrapper)
    kept_run = dpivon.Checkpoints(folder, engine=engine, optimizer=optimizer, data_loader=loader)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        begun = kept_run.restore()
        before = trainings.learned(engine, optimizer) if begun.steps else None
        if fault is not None and fault[0] == rank:
            fail_in(*fault[1:])
        done = [begun.steps]
        optimizer.attach_step_hook(lambda _: done.__setitem__(0, done[0] + 1))
        with kept_run.saving_on_signals():
            while done[0] < steps:
                for x, y in loader:
                    trainings.one_step(model, optimizer, x, y)
                    if done[0] % every == 0:
                        kept_run.save()
                    if done[0] >= steps:
                        break
    return {
        "steps": begun.steps,
        "lost": begun.lost,
        "before": before,
        "learned": trainings.learned(engine, optimizer),
        "told": [str(w.message) for w in told],
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks learn that nobody disturbs."""
    return run(2, kept, str(tmp_path_factory.mktemp("whole")), STEPS)[0]["learned"]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize(
    ("fault", "charged"),
    [((1, "reduce_to_first", 5, signal.SIGKILL), 4), ((0, "broadcast", 5, signal.SIGKILL), 5)],
    ids=["another rank, while sums are added up", "the first, between charge and release"],
)
def test_a_rank_is_killed_in_a_step(tmp_path, whole: Any, fault: Any, charged: int) -> None:
    ended = launch(2, kept, str(tmp_path / "run"), STEPS, fault)
    assert ended[fault[0]] == ("killed", -9)
    word, text = ended[1 - fault[0]]
    assert word == "RankError"
    assert "start all of them again" in text
    assert "timed out" not in text.lower()  # at once, not at the time limit of the group
    assert read(tmp_path / "run" / "ledger.jsonl").releases == charged
    results = run(2, kept, str(tmp_path / "run"), STEPS)
    for result in results:  # lost releases are made again to the bit, at no cost
        assert (result["steps"], result["lost"]) == (3, charged - 3)
        assert trainings.apart(result["learned"], whole) == 0.0
        assert result["learned"]["epsilon"] == whole["epsilon"]


@pytest.mark.slow
def test_a_rank_that_hangs_is_given_up_at_the_time_limit_of_the_group(tmp_path) -> None:
    ended = launch(2, kept, str(tmp_path), STEPS, (1, "reduce_to_first", 2, signal.SIGSTOP), timeout=15)
    assert [word for word, _ in ended] == ["RankError", "silent"]
    assert "did not answer in time" in ended[0][1]


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, whole: Any) -> None:
    """Sums of four ranks are rounded otherwise. The noise that two ranks would have added must not meet them."""
    saved = run(2, kept, str(tmp_path / "run"), 6)[0]["learned"]
    for result in run(4, kept, str(tmp_path / "run"), 6):
        assert trainings.apart(result["learned"], saved) == 0.0
    results = run(4, kept, str(tmp_path / "run"), STEPS)
    for result in results:
        assert (result["steps"], result["lost"], result["told"]) == (6, 0, [])
        assert trainings.apart(result["learned"], results[0]["learned"]) == 0.0
        assert trainings.apart(result["learned"], whole) > 1000 * ROUNDING
        assert result["learned"]["epsilon"] == whole["epsilon"]
    alone = kept(0, str(tmp_path / "run"), STEPS + 1)  # and in a process alone
    assert (alone["steps"], alone["told"]) == (STEPS, [])
    assert alone["learned"]["epsilon"] > whole["epsilon"]


@pytest.mark.slow
def test_after_a_crash_on_other_ranks_what_was_lost_stays_charged(tmp_path, whole: Any) -> None:
    """Sums of four ranks are rounded otherwise, so a lost release cannot be made again to the bit: it is dropped."""
    launch(2, kept, str(tmp_path / "run"), STEPS, (1, "reduce_to_first", 6, signal.SIGKILL))
    results = run(4, kept, str(tmp_path / "run"), STEPS)
    for result in results:
        assert (result["steps"], result["lost"]) == (3, 2)
        assert any("dropped and not released" in text for text in result["told"])
        assert trainings.apart(result["learned"], results[0]["learned"]) == 0.0
        assert sum(row[2] for row in result["learned"]["history"]) == STEPS + 2
        assert result["learned"]["epsilon"] > whole["epsilon"]
    assert read(tmp_path / "run" / "ledger.jsonl").releases == STEPS + 2


def test_a_signal_to_one_rank_stops_all_of_them_in_good_order(tmp_path, whole: Any) -> None:
    ended = launch(2, kept, str(tmp_path / "run"), STEPS, (1, "reduce_to_first", 5, signal.SIGTERM), None, 100)
    assert [word for word, _ in ended] == ["SystemExit", "SystemExit"]
    assert all(text.startswith("143") for _, text in ended)
    for result in run(2, kept, str(tmp_path / "run"), STEPS):
        assert result["lost"] == 0
        assert result["steps"] >= 5
        assert trainings.apart(result["learned"], whole) == 0.0


@pytest.mark.slow
def test_a_sharded_run_goes_on_however_it_is_cut_up(tmp_path) -> None:
    folder = str(tmp_path)
    saved = run(2, kept, folder, 6, None, trainings.shard)[0]["learned"]
    for result in run(3, kept, folder, 7, None, trainings.shard):
        assert (result["steps"], result["lost"]) == (6, 0)
        assert trainings.apart(result["before"], saved) == 0.0  # posterior and curvature, to the bit
    (result,) = run(1, kept, folder, STEPS)  # whole again; the seventh release was not saved
    assert (result["steps"], result["lost"]) == (6, 1)
    assert trainings.apart(result["before"], saved) == 0.0
    assert any("stay charged" in text for text in result["told"])
    assert sum(row[2] for row in result["learned"]["history"]) == STEPS + 1


def full_disk(rank: int, folder: str) -> Any:
    engine, model, optimizer, loader = trainings.start(engine=dpivon.PrivacyEngine(ledger=f"{folder}/ledger.jsonl"))
    batches = iter(loader)
    trainings.one_step(model, optimizer, *next(batches))
    if rank == 0:
        os.unlink(f"{folder}/ledger.jsonl")  # the charge cannot be written
    before = [p.detach().clone() for p in model.parameters()]
    try:
        trainings.one_step(model, optimizer, *next(batches))
    except dpivon.StorageError as error:
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return str(error), same, len(engine.accountant)
    return None


def test_if_the_charge_cannot_be_written_no_rank_learns_anything(tmp_path) -> None:
    for text, same, charged in run(2, full_disk, str(tmp_path)):
        assert "nothing was released" in text
        assert same
        assert charged == 1
