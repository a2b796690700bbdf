"""A private temperature in a study is charged wherever the stack is kept, before any answer is drawn."""

from __future__ import annotations

from dataclasses import replace

import torch
from clusters import LONG

from dpivon.privacy.temperature import HALVINGS
from dpivon.study.plan.data import load_data
from dpivon.study.run.progress import Progress
from dpivon.study.run.settings import Settings
from dpivon.study.run.work import Custody, Work


class Watched(Custody):
    """Notes what was announced, and how much was charged then."""

    def __init__(self) -> None:
        self.seen = []
        self.work = None

    def ahead(self, terms, upto):
        self.seen.append((terms, upto, self.work.stack.mechanism.charged))


def test_whoever_else_keeps_the_stack_hears_of_a_temperature_before_it_is_charged_or_drawn(tmp_path):
    plan = replace(LONG, epochs=1, runs=LONG.runs[:1], temperature_noise=20.0)
    cpu, custody = torch.device("cpu"), Watched()
    data = load_data(plan, tmp_path, cpu)
    with Progress(1.0, 0.0, quiet=True) as progress:
        settings = Settings(quiet=True, block=8, device="cpu")
        work = Work(plan, plan.runs, tmp_path / "stack", data, settings, cpu, progress, "one", custody)
        custody.work = work
        assert work.train(lambda: False)
        trained = work.stack.mechanism.charged
        kept = []
        assert work.evaluate(kept.append)
    ((row,),) = (results.rows for results in kept)
    tempered = [seen for seen in custody.seen if [t["mechanism"] for t in seen[0]] == ["gaussian, temperature"]]
    (_, upto, charged), *notes = tempered  # and before every note of what is asked
    assert [seen[1:] for seen in notes] == [(upto, upto)] * HALVINGS
    assert (upto, charged) == (trained + HALVINGS, trained)
    assert work.stack.mechanism.charged == upto
    assert row["epsilon_tempered"] > row["epsilon"]
