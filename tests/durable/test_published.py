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
from dpivon.durable.checkpoint import Rotation
from dpivon.durable.ledger import Ledger, read
from dpivon.durable.tensors import bytes_of, write_tensors
from dpivon.privacy.accounting import epsilon
from dpivon.privacy.export import export
from dpivon.privacy.mechanism import NoiseSpec


def command(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.output


def test_the_same_tensors_and_metadata_are_the_same_file(tmp_path):
    names = [f"name {i}" for i in range(20)]
    for place, order in enumerate((names, names[::-1], sorted(names, key=hash))):
        write_tensors(tmp_path / str(place), {"mean": torch.ones(3)}, dict.fromkeys(order, "1"))
    assert len({(tmp_path / str(place)).read_bytes() for place in range(3)}) == 1


def test_show_recomputes_epsilon_with_every_accountant(tmp_path):
    run = Run(tmp_path, "adam").train(stop_at=6)
    code, text = command("ledger", "show", tmp_path, "--delta", DELTA, "--json")
    assert code == 0
    (found,) = json.loads(text)
    assert found["releases"] == 6
    expected = {name: epsilon([(1.0, 0.2, 6)], DELTA, name) for name in ("rdp", "prv", "pld")}
    assert found["runs"][0]["epsilon"] == expected
    assert expected["pld"] == run.epsilon
    terms = found["runs"][0]["terms"][0]
    assert terms["spec"] == run.optimizer.spec.digest
    assert (terms["noise_multiplier"], terms["max_grad_norm"], terms["sample_rate"]) == (1.0, 1.0, 0.2)
    code, text = command("ledger", "show", tmp_path / "ledger.jsonl", "--delta", DELTA)
    assert f"pld {run.epsilon:.6g}" in text
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


ESCAPE = "\x1b]0;owned\x07\x9b31m\u202eε\n    ε at δ = 1e-05: rdp 0.001"


def test_nothing_that_a_file_says_steers_the_terminal(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    terms = NoiseSpec(1.0, 1.0, 8.0, 0.2).terms
    ledger.charge(tuple({**terms, "run": f"{ESCAPE}{i}", "noise": ESCAPE} for i in range(2)), 3)
    outputs = [command("ledger", *words, tmp_path)[1] for words in (("show",), ("show", "--json"), ("verify",))]
    ledger.path.write_bytes(ledger.path.read_bytes().replace(b'"noise_multiplier":1.0', b'"noise_multiplier":9.0'))
    outputs += [command("ledger", words, tmp_path)[1] for words in ("show", "verify")]
    for text in outputs:
        assert all(c.isprintable() or c == "\n" for c in text)
        assert "\n    ε at δ = 1e-05: rdp 0.001" not in text
    assert "\\x1b]0;owned\\x07\\x9b31m\\u202eε\\n    ε at" in outputs[0]
    assert json.loads(outputs[1])[0]["runs"][0]["run"] == f"{ESCAPE}0"


def test_verify_says_what_the_chain_proves_and_what_it_does_not(tmp_path):
    for name in ("a", "b"):
        Ledger(tmp_path / name / "ledger.jsonl").charge((NoiseSpec(1.0, 1.0, 8.0, 0.2).terms,), 3)
    code, text = command("ledger", "verify", tmp_path)
    assert code == 0
    assert text.count("the chain holds; 3 releases") == 2
    assert read(tmp_path / "a" / "ledger.jsonl").head in text
    assert "Proved: every line follows" in text
    assert "Not proved: there is no secret key" in text
    path = tmp_path / "a" / "ledger.jsonl"
    first, second, third, _ = path.read_bytes().split(b"\n")
    for lines in (
        [first, second.replace(b'"noise_multiplier":1.0', b'"noise_multiplier":9.0'), third],
        [first, third],
        [first, second, third, third],
        [second, first, third],
    ):
        path.write_bytes(b"\n".join([*lines, b""]))
        code, text = command("ledger", "verify", tmp_path)
        assert code == 1
        assert text.startswith(f"FAILED {path}, line ")
        assert text.count("the chain holds") == 1  # the other ledger is looked at all the same
        assert "Proved: " not in text.replace("Not proved: ", "")
    code, text = command("ledger", "verify", tmp_path / "nowhere")
    assert code == 2
    assert "holds no ledger" in text


def test_terms_that_are_none_of_a_release_fail_though_their_chain_holds(tmp_path):
    Ledger(tmp_path / "ledger.jsonl").charge(({"noise_multiplier": -1.0},), 3)
    code, text = command("ledger", "verify", tmp_path)
    assert code == 1
    assert "holds terms that are none of a release" in text


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("place", ["config.yaml", "ledgers/x", "stacks/x", ""])
def test_epsilon_is_shown_at_the_runs_own_delta(tmp_path, place):
    """It was shown at 1e-5, after training at 1e-4."""
    known = {"config.yaml": "config.yaml"}.get(place, "study.json")
    (tmp_path / known).write_text('{"delta": 0.0003}')  # which is YAML, too
    path = tmp_path / ("" if place == "config.yaml" else place) / "ledger.jsonl"
    Ledger(path).charge((NoiseSpec(1.0, 1.0, 8.0, 0.2).terms,), 3)
    (found,) = json.loads(command("ledger", "show", path, "--json")[1])
    delta = 3e-4 if place else 1e-5  # a plan is that of its stacks alone
    assert found["delta"] == delta
    assert found["runs"][0]["epsilon"]["rdp"] == epsilon([(1.0, 0.2, 3)], delta, "rdp")
    assert ("(the folder names no δ)" in command("ledger", "show", path)[1]) == (not place)
    (found,) = json.loads(command("ledger", "show", path, "--json", "--delta", 0.01)[1])
    assert found["delta"] == 0.01
    if place:
        for spoilt in ("{}", "no: [", '{"delta": 2}'):
            (tmp_path / known).write_text(spoilt)
            code, text = command("ledger", "show", path)
            assert code == 2
            assert "Give --delta" in text


def test_an_export_states_epsilon_at_the_runs_own_delta(tmp_path):
    run = Run(tmp_path / "run", "adam").train(stop_at=2)
    run.kept.save()
    (tmp_path / "run" / "config.yaml").write_text("delta: 0.0003\n")
    _, text = command("export", tmp_path / "run", "--out", tmp_path / "out")
    assert "at δ = 0.0003 by pld" in text
    told = json.loads((tmp_path / "out" / "privacy.json").read_text())
    assert (told["delta"], told["epsilon"]["rdp"]) == (3e-4, epsilon([(1.0, 0.2, 2)], 3e-4, "rdp"))
    export(tmp_path / "run", tmp_path / "again")
    assert json.loads((tmp_path / "again" / "privacy.json").read_text()) == told


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
    assert json.loads((tmp_path / "out" / "privacy.json").read_text())["epsilon"]["pld"] == run.epsilon
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
