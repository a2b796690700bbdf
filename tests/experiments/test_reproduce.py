"""Published cells again: what agrees, what differs, and a small run of every part."""

from __future__ import annotations

import pytest
import torch
from experiments.reproduce import Comparison, lines

from experiments import reproduce


def test_a_score_that_moved_by_more_than_its_seeds_do_differs() -> None:
    same = [0.94, 0.95, 0.93, 0.945]
    near, far = [0.935, 0.95, 0.94, 0.93], [0.90, 0.91, 0.905, 0.9]
    found = [Comparison("a", "accuracy", same, near), Comparison("a", "accuracy", same, far)]
    said, different = lines(found)
    assert different == 1
    assert [line.rsplit(" | ", 1)[1] for line in said[2:]] == ["agrees |", "**differs** |"]
    assert Comparison("b", "nll", [0.5, 0.5], [0.5, 0.5]).p == 1.0
    assert Comparison("b", "nll", [0.5, 0.5], [0.6, 0.6]).p < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("part", ["tables", "quick", "steady"])
def test_a_small_run_agrees(part: str, tmp_path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr("sys.argv", ["reproduce", "--toy", "--parts", part, "--work", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        reproduce.main()
    assert ended.value.code == 0, capsys.readouterr().out
