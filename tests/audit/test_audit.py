"""The audit passes the library as it is, on every path, and fails it with a bug in it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from matrix import METHOD, judge, under
from mutants import mutants
from sowing import Mutant
from torch import Tensor, nn
from typer.testing import CliRunner

import dpivon
from dpivon import ArgumentError
from dpivon.audit.distributed_session import can_fork
from dpivon.audit.page import write
from dpivon.audit.probes import probe
from dpivon.audit.run import CHECKS, Audit
from dpivon.audit.session import PATHS, PEOPLE_PATHS, VARIED_PATHS, Finding, Setting, silence, start
from dpivon.audit.tier_a import TIER_A
from dpivon.audit.tier_b import TIER_B
from dpivon.audit.tier_c import Audited
from dpivon.cli import app
from dpivon.privacy.gradients.watching import has_rules

MUTANTS = mutants()
RUNNABLE = [p for p in PATHS if p != "distributed" or can_fork()]


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("path", RUNNABLE)
def test_the_library_as_it_is_passes(path: str) -> None:
    findings = [check(probe(path, METHOD)) for check in (*TIER_A, *TIER_B)]
    assert [f for f in findings if f.holds is False] == []
    assert sum(f.holds is True for f in findings) >= 14


def test_no_layer_has_a_rule_where_all_run_alone() -> None:
    for method in ("dp-sgd", METHOD, "dp-bbp"):
        subject = probe("alone", method)
        session: Any = start(subject, Setting(), silence)
        session.step([0, 1])
        owners = [layer for layer in session.module.modules() if layer._parameters]
        assert not any(map(has_rules, owners))
        assert set(session.optimizer.source._watched) == session.optimizer.source.alone_now == set(owners)
        assert all(map(has_rules, start(subject.but(path="bookkeeping"), Setting()).network_as_trained().children()))


FAST = ("bookkeeping", "alone", "stacked")  # the rest is for `make audit`


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "views"),
    [
        pytest.param(p, views, marks=[] if views == 2 and p in FAST else pytest.mark.slow)
        for p in VARIED_PATHS
        for views in (2, 3)
    ],
)
def test_it_passes_with_views_too(path: str, views: int) -> None:
    findings = [check(probe(path, METHOD, views=views)) for check in (*TIER_A, *TIER_B)]
    assert [f for f in findings if f.holds is False] == []
    assert sum(f.holds is True for f in findings) >= 14


@pytest.mark.slow
@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("path", PEOPLE_PATHS)
def test_it_passes_with_people_too(path: str) -> None:
    findings = [check(probe(path, METHOD, rows_per_user=3)) for check in (*TIER_A, *TIER_B)]
    assert [f for f in findings if f.holds is False] == []
    assert sum(f.holds is True for f in findings) >= 14


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize("method", ["dp-calm", "dp-steady"])
@pytest.mark.parametrize("path", ["bookkeeping", "stacked"])
def test_a_curvature_that_overflows_is_no_trace_of_the_data(path: str, method: str) -> None:
    """In the drowning noise of several large steps theirs became NaN, which equals nothing: a finding against the recipe."""
    (check,) = [c for c in TIER_A if "frozen" in c.name]
    assert check(probe(path, method)).holds is True


@pytest.mark.slow
@pytest.mark.parametrize("path", RUNNABLE)
def test_it_passes_inside_the_callers_autocast(path: str) -> None:
    findings = [check(probe(path, METHOD, autocast=True)) for check in TIER_A]
    assert [f for f in findings if f.holds is False] == []
    assert sum(f.holds is True for f in findings) >= 9


def test_what_a_path_cannot_do_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="views=3: is not for path='distributed'"):
        probe("distributed", METHOD, views=3)
    with pytest.raises(ArgumentError, match="rows_per_user=3: is not for path='stacked'"):
        probe("stacked", METHOD, rows_per_user=3)


@pytest.mark.parametrize("path", [p for p in RUNNABLE if p in ("bookkeeping", "distributed")])
def test_a_network_that_a_method_cannot_train_is_no_finding(path: str) -> None:
    for part in ("canaries in single releases", "that cancels"):
        (check,) = [c for c in CHECKS if part in c.name]
        assert check(probe(path, "dp-mc-dropout")).holds is None


def test_the_canaries_are_found_and_prove_no_more_than_is_claimed() -> None:
    from dpivon.audit.tier_c import one_run, single_releases

    found = single_releases(probe("bookkeeping", METHOD), 1.0)
    assert 0.9 * found.expected < found.audited <= found.claimed
    assert found.claimed == pytest.approx(4.38, abs=0.01)
    whole = one_run(probe("stacked", METHOD), 1.0)
    assert 1.0 < whole.audited <= whole.claimed


def test_no_cell_of_the_matrix_is_empty() -> None:
    assert len(MUTANTS) == len({m.name for m in MUTANTS}) > 45
    for mutant in MUTANTS:
        assert set(mutant.paths) == set(PATHS)
        assert all(callable(cell) or len(cell) > 10 for cell in mutant.paths.values())
        assert any(mutant.expect in check.name for check in CHECKS)


@pytest.mark.campaign(keep=5)
@pytest.mark.parametrize("i", range(len(MUTANTS)), ids=[m.name for m in MUTANTS])
def test_the_check_that_should_see_a_bug_sees_it(i: int) -> None:
    """On one path each, by turns; `make audit` has all of them."""
    mutant = MUTANTS[i]
    possible = [p for p in RUNNABLE if callable(mutant.paths[p]) and p != "captured"]
    if not possible:
        pytest.skip(str(mutant.paths["captured"]))
    path = possible[i % len(possible)]
    (check,) = [c for c in CHECKS if mutant.expect in c.name]
    finding = under(mutant.paths[path], check, path, mutant.on)
    assert finding.holds is False, finding.detail
    assert path == "distributed" or probe_is_whole_again(path, check.name, mutant.on)  # its ranks end with the block


def probe_is_whole_again(path: str, name: str, on: dict[str, Any]) -> bool:
    """A bug must not outlive its block, or the next cell would be caught by the wrong one."""
    check = next(c for c in CHECKS if c.name == name)
    return "canaries" in name or check(probe(path, METHOD, **on)).holds is not False


@pytest.mark.slow
@pytest.mark.parametrize("path", RUNNABLE)
@pytest.mark.parametrize("mutant", MUTANTS, ids=[m.name for m in MUTANTS])
def test_every_bug_is_caught_on_every_path(mutant: Mutant, path: str) -> None:
    cell = judge(mutant, path)
    assert cell.verdict != "missed"


class Tokens(nn.Module):
    """Inputs that are no real numbers, and a layer of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.embedding(x).mean(1))
        return out


@pytest.mark.slow
def test_a_model_and_an_optimizer_of_ones_own(tmp_path) -> None:
    torch.manual_seed(0)
    model, x, y = Tokens(), torch.randint(9, (20, 5)), torch.randint(3, (20,))
    before = [p.detach().clone() for p in model.parameters()]
    state = torch.random.get_rng_state()
    report = dpivon.audit(
        model, (x, y), method=lambda m: torch.optim.Adam(m.parameters(), lr=1e-3), path="alone", quick=True
    )
    assert report.holds, report.failures
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(state, torch.random.get_rng_state())
    report.write(tmp_path)
    written = json.loads((tmp_path / "audit.json").read_text())
    assert written["holds"]
    assert "canaries in single releases" in {f["check"] for f in written["audits"][0]["findings"]}
    page = (tmp_path / "audit.html").read_text()
    assert "Nothing was found against the guarantee" in page
    assert set(re.findall(r"https?://[^\s\"']*", page)) <= {"http://www.w3.org/2000/svg"}  # the name of a namespace


def test_an_optimizer_that_looks_behind_the_boundary_is_found() -> None:
    class Peeking(torch.optim.SGD):
        def step(self, closure=None):
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        p.add_(1e-3 * p.summed_grad.to(p.dtype))
            return super().step(closure)

    subject = probe("bookkeeping", lambda m: Peeking(m.parameters(), lr=2.0**-36))
    (check,) = [c for c in TIER_A if "frozen" in c.name]
    assert check(subject).holds is False
    assert check(subject.but(method=lambda m: torch.optim.SGD(m.parameters(), lr=2.0**-36))).holds is True


@pytest.mark.slow
def test_the_command_says_so_and_fails_where_something_is_wrong(tmp_path) -> None:
    arguments = ["audit", "--model", "small", "--path", "stacked", "--quick", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "out" / "audit.html").read_text()
    assert "leave out <code>--quick</code>" in page
    assert "<figure" not in page  # nothing to draw
    assert page.count("<table") == 1
    assert not (tmp_path / "out" / "audit.png").exists()
    half = next(m for m in MUTANTS if m.name == "half the noise")
    with half.paths["stacked"]():
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "FAILED" in result.output
    assert json.loads((tmp_path / "out" / "audit.json").read_text())["holds"] is False


def test_the_page_draws_bounds_and_names_what_refutes_the_claim(tmp_path) -> None:
    bounds = [
        Audited("single releases", s, 1000, a, c, e, 1.2) for s, a, c, e in ((1, 3.6, 4.4, 3.7), (2, 2.1, 1.9, 1.5))
    ]
    findings = [Finding(CHECKS[0].name, True, "as it should <be>")]
    audit = Audit("bookkeeping", "dp-sgd", "Linear", 6, findings, bounds)
    write([audit], tmp_path, [("half the noise", bounds[1])])
    page = (tmp_path / "audit.html").read_text()
    assert "audited ε ≥ 2.10 above the claimed 1.90" in page[: page.index("<main")]
    assert "as it should &lt;be&gt;" in page
    assert "planted bug: half the noise" in page
    assert (tmp_path / "audit.png").stat().st_size > 10_000
    assert "light-dark(" in page  # follows the reader's system
    assert 'content="width=device-width' in page


@pytest.mark.slow
def test_views_and_autocast_are_audited_by_name() -> None:
    subject = probe("alone", METHOD)
    data, told = (subject.inputs, subject.labels), []
    report = dpivon.audit(subject.model, data, path="alone", views=2, quick=True, progress=told.append)
    assert report.holds, report.failures
    assert report.path == "alone, 2 views"
    assert any("frozen" in name for name in told)
    report = dpivon.audit(subject.model, data, path="stacked", autocast=True, quick=True)
    assert (report.holds, report.path) == (True, "stacked, autocast")


def test_bad_arguments_are_named() -> None:
    model, x, y = nn.Linear(3, 2), torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)
    with pytest.raises(ArgumentError, match="path='gost'"):
        dpivon.audit(model, (x, y), path="gost")
    for mode in ("hooks", "functorch", "ew", "ghost"):
        with pytest.raises(ArgumentError, match=f"path='{mode}'.* means book-keeping"):
            dpivon.audit(model, (x, y), path=mode)
    with pytest.raises(ArgumentError, match="method='sgd'"):
        dpivon.audit(model, (x, y), method="sgd")
    with pytest.raises(ArgumentError, match="stacked"):
        dpivon.audit(model, (x, y), method=lambda m: torch.optim.SGD(m.parameters()), path="stacked")
    with pytest.raises(ArgumentError, match="at least 4"):
        dpivon.audit(model, (x[:2], y[:2]))
    result = CliRunner().invoke(app, ["audit", "--model", "nothing", "--out", "x"])
    assert result.exit_code == 2
