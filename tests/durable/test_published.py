"""What is read off a ledger, and what is published of a run."""

from __future__ import annotations

import json

import pytest
import torch
from resumable import DELTA, Run
from safetensors.torch import load_file
from typer.testing import CliRunner

from dpivon import Posterior
from dpivon.cli import app
from dpivon.durable.checkpoint import Rotation, bytes_of
from dpivon.durable.ledger import Ledger
from dpivon.privacy.accounting import epsilon
from dpivon.privacy.spec import NoiseSpec


def command(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.output


def test_show_recomputes_epsilon_with_every_accountant(tmp_path):
    run = Run(tmp_path, "adam").train(stop_at=6)
    code, text = command("ledger", "show", tmp_path, "--delta", DELTA, "--json")
    assert code == 0
    (found,) = json.loads(text)
    assert found["releases"] == 6
    expected = {name: epsilon([(1.0, 0.2, 6)], DELTA, name) for name in ("rdp", "prv", "pld")}
    assert found["runs"][0]["epsilon"] == expected
    assert expected["rdp"] == run.epsilon
    terms = found["runs"][0]["terms"][0]
    assert terms["spec"] == run.optimizer.spec.digest
    assert (terms["noise_multiplier"], terms["max_grad_norm"], terms["sample_rate"]) == (1.0, 1.0, 0.2)
    code, text = command("ledger", "show", tmp_path / "ledger.jsonl", "--delta", DELTA)
    assert f"rdp {run.epsilon:.6g}" in text
    assert "6 × σ = 1, q = 0.2" in text


def test_show_says_infinite_where_one_release_was_not_private(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.charge((NoiseSpec(1.0, 1.0, 8.0, 0.2).terms,), 3)
    ledger.charge((NoiseSpec(1.0, 1.0, 8.0, 0.2, poisson=False).terms,), 1)
    _, text = command("ledger", "show", tmp_path, "--json")
    assert set(json.loads(text)[0]["runs"][0]["epsilon"].values()) == {"inf"}
    _, text = command("ledger", "show", tmp_path)
    assert "1 × ε = inf, not private" in text


def test_show_refuses_a_damaged_ledger_in_one_line(tmp_path):
    run = Run(tmp_path, "adam").train(stop_at=2)
    run.close()
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"sample_rate":0.2', b'"sample_rate":0.1'))
    code, text = command("ledger", "show", tmp_path)
    assert code == 2
    assert text.startswith("error: ")
    assert "line 2: was changed or damaged" in text
    assert text.count("\n") == 1
    code, text = command("ledger", "show", tmp_path / "nowhere")
    assert "holds no ledger" in text


def test_an_export_has_the_model_and_nothing_that_draws(tmp_path):
    run = Run(tmp_path / "run", "ivon").train(stop_at=6)
    run.kept.save()
    code, text = command("export", tmp_path / "run", "--out", tmp_path / "out", "--delta", DELTA)
    assert code == 0, text
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "model.safetensors",
        "posterior.safetensors",
        "privacy.json",
    }
    state = run.net.state_dict()
    model = load_file(tmp_path / "out" / "model.safetensors")
    assert model.keys() == state.keys()
    assert all(torch.equal(model[name], state[name]) for name in state)
    ours, theirs = run.optimizer.posterior(), Posterior.load(tmp_path / "out" / "posterior.safetensors")
    for name, mean in ours.mean.items():
        assert torch.equal(mean, theirs.mean[name])
        assert torch.equal(ours.variance[name], theirs.variance[name])
    assert json.loads((tmp_path / "out" / "privacy.json").read_text())["epsilon"]["rdp"] == run.epsilon
    published = b"".join(p.read_bytes() for p in (tmp_path / "out").iterdir())
    secret = Rotation(tmp_path / "run").read()
    drawing = [s for s in secret["generators"].values() if s is not None]
    assert len(drawing) == 3  # IVON draws from the global one
    for value in (*drawing, secret["key"]):
        assert bytes_of(value)[-32:] not in published
    for own in secret["optimizer"]["state"].values():
        assert bytes_of(own["momentum"]) not in published
    code, text = command("export", tmp_path / "run", "--out", tmp_path / "out")
    assert code == 2
    assert "exists" in text
    code, text = command("export", tmp_path / "out", "--out", tmp_path / "again")
    assert "holds no checkpoint" in text


def test_a_pickle_in_the_place_of_a_checkpoint_is_not_executed(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    run = Run(tmp_path / "run", "adam").train(stop_at=2)
    path = run.kept.save()
    run.close()
    torch.save({"model": Bomb()}, path)
    second = Run(tmp_path / "run", "adam")
    with pytest.warns(UserWarning, match=f"{path.name}.*never opened"):
        assert second.kept.restore().steps == 0
    assert not (tmp_path / "executed").exists()
    second.close()
    torch.save(Bomb(), tmp_path / "run" / "ledger.jsonl")
    code, _ = command("ledger", "show", tmp_path / "run")
    assert code == 2
    assert not (tmp_path / "executed").exists()


def test_opacus_checkpoints_never_take_back_what_the_ledger_has(tmp_path):
    first = Run(tmp_path / "run", "adam").train(stop_at=2)
    first.engine.save_checkpoint(path=tmp_path / "old.pt", module=first.model, optimizer=first.optimizer)
    first.train(stop_at=3, resume=False)
    first.close()
    second = Run(tmp_path / "run", "adam")
    second.engine.load_checkpoint(path=tmp_path / "old.pt", module=second.model, optimizer=second.optimizer)
    assert len(second.engine.accountant) == 5
    assert second.epsilon == first.epsilon
    third = Run(tmp_path / "other", "adam")
    with pytest.raises(ValueError, match="releases that the ledger of this engine does not"):
        third.engine.load_checkpoint(path=tmp_path / "old.pt", module=third.model, optimizer=third.optimizer)
