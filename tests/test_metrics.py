"""Each metric against scikit-learn or a plain loop over its definition."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from torch import Tensor

from dpivon import metrics
from dpivon.errors import ArgumentError


def problem(n: int = 300, c: int = 4, seed: int = 0, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(n, c, generator=generator, dtype=torch.float64)
    labels = torch.multinomial((0.6 * logits).softmax(-1), 1, generator=generator)[:, 0]
    return logits.softmax(-1), labels


P, Y = problem()


def test_against_scikit_learn() -> None:
    p, y = P.numpy(), Y.numpy()
    assert metrics.accuracy(P, Y) == pytest.approx(sk.accuracy_score(y, p.argmax(1)), abs=1e-6)
    assert metrics.nll(P, Y) == pytest.approx(sk.log_loss(y, p, labels=range(4)), rel=1e-9)
    loss = [sk.brier_score_loss(y == c, p[:, c]) for c in range(4)]
    assert metrics.brier(P, Y) == pytest.approx(sum(loss), rel=1e-9)


def brute_ece(p: Tensor, y: Tensor, bins: int) -> float:
    total = 0.0
    for b in range(bins):
        low, high = b / bins, (b + 1) / bins
        inside = [
            (row.max().item(), row.argmax().item() == label.item())
            for row, label in zip(p, y, strict=True)
            if low <= row.max() < high or (b == bins - 1 and row.max() >= 1)
        ]
        total += abs(sum(c for c, _ in inside) - sum(ok for _, ok in inside))
    return total / len(p)


def brute_adaptive_ece(p: Tensor, y: Tensor, bins: int) -> float:
    rows = [(max(r), int(np.argmax(r)) == label) for r, label in zip(p.tolist(), y.tolist(), strict=True)]
    rows.sort(key=lambda row: row[0])
    n, total, start = len(rows), 0.0, 0
    for b in range(bins):
        size = n // bins + (b < n % bins)
        part = rows[start : start + size]
        if part:
            gap = sum(c for c, _ in part) / size - sum(ok for _, ok in part) / size
            total += size / n * abs(gap)
        start += size
    return total


@pytest.mark.parametrize("bins", [1, 7, 15])
@pytest.mark.parametrize("n", [5, 100, 301])
def test_calibration_errors_against_loops(n: int, bins: int) -> None:
    p, y = problem(n)
    assert metrics.ece(p, y, bins) == pytest.approx(brute_ece(p, y, bins), abs=1e-5)
    assert metrics.adaptive_ece(p, y, bins) == pytest.approx(brute_adaptive_ece(p, y, bins), abs=1e-12)


def test_a_calibrated_set_has_no_calibration_error_and_an_overconfident_one_its_gap() -> None:
    """Ten groups of 1000 with confidence c and exactly 1000·c right."""
    confidence = torch.arange(0.525, 1, 0.05).double().repeat_interleave(1000)
    right = torch.cat([torch.arange(1000) < round(1000 * c) for c in np.arange(0.525, 1, 0.05)])
    labels = (~right).long()
    honest = torch.stack([confidence, 1 - confidence], -1)
    assert metrics.ece(honest, labels) < 1e-7
    # The adaptive bins cut through the groups, whose first examples are all right: shuffled, it is near 0.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    assert metrics.adaptive_ece(honest[order], labels[order]) < 0.01
    # Said with 0.99 each, the truth being 0.75 on average.
    sure = torch.tensor([[0.99, 0.01]], dtype=torch.float64).expand(len(labels), 2)
    gap = 0.99 - float(right.double().mean())
    assert metrics.ece(sure, labels) == pytest.approx(gap, abs=1e-3)
    assert metrics.ece(sure, labels) > 0.2
    assert metrics.adaptive_ece(sure[order], labels[order]) == pytest.approx(gap, abs=1e-9)


def test_total_confidence_belongs_to_the_last_bin() -> None:
    """Errors of opposite sign at 1.0 and at 0.95 cancel inside one bin, and would not in two."""
    p = torch.tensor([[1.0, 0.0], [0.95, 0.05]]).double()
    y = torch.tensor([1, 0])
    assert metrics.ece(p, y, 10) == pytest.approx(abs(1.95 - 1) / 2, abs=1e-6)
    assert metrics.reliability_bins(p, y, 10).count.tolist() == [0] * 9 + [2]


def test_rounding_above_one_is_not_taken_for_logits() -> None:
    p = torch.tensor([[1.0000002, 0.0], [0.3, 0.7]])
    y = torch.tensor([0, 1])
    assert metrics.ece(p, y) == pytest.approx(0.15, abs=1e-5)
    assert metrics.accuracy(p, y) == 1


@pytest.mark.parametrize("bins", [4, 15])
def test_reliability_bins_are_those_of_ece(bins: int) -> None:
    r = metrics.reliability_bins(P, Y, bins)
    full = r.count > 0
    assert int(r.count.sum()) == len(P)
    assert r.edges.shape == (bins + 1,)
    assert torch.all((r.confidence >= r.edges[:-1] - 1e-6)[full] & (r.confidence <= r.edges[1:] + 1e-6)[full])
    assert torch.isnan(r.accuracy[~full]).all()
    error = (r.count * (r.accuracy - r.confidence).abs())[full].sum() / len(P)
    assert metrics.ece(P, Y, bins) == pytest.approx(float(error), abs=1e-5)
    assert float((r.count * r.accuracy)[full].sum() / len(P)) == pytest.approx(metrics.accuracy(P, Y), abs=1e-6)


def test_risk_coverage_against_a_loop() -> None:
    coverage, risk = metrics.risk_coverage(P, Y)
    rows = sorted(zip(P.tolist(), Y.tolist(), strict=True), key=lambda row: -max(row[0]))
    wrong = [int(np.argmax(p)) != y for p, y in rows]
    expected = [sum(wrong[:k]) / k for k in range(1, len(wrong) + 1)]
    np.testing.assert_allclose(risk.numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(coverage.numpy(), np.arange(1, 301) / 300)
    assert metrics.aurc(P, Y) == pytest.approx(sum(expected) / 300)
    assert float(risk[-1]) == pytest.approx(1 - metrics.accuracy(P, Y), abs=1e-6)


def test_ties_are_answered_in_the_order_given() -> None:
    p = torch.full((4, 2), 0.5)
    wrong_first, wrong_last = torch.tensor([1, 0, 0, 0]), torch.tensor([0, 0, 0, 1])
    assert metrics.risk_coverage(p, wrong_first)[1].tolist() == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    assert metrics.risk_coverage(p, wrong_last)[1].tolist() == pytest.approx([0, 0, 0, 1 / 4])


def test_aurc_prefers_a_confidence_that_ranks_errors_last() -> None:
    y = torch.tensor([0, 0, 0, 1])
    good = torch.tensor([0.9, 0.8, 0.7, 0.6])
    stack = lambda c: torch.stack([c, 1 - c], -1)  # noqa: E731
    assert metrics.aurc(stack(good), y) == pytest.approx(1 / 16)
    assert metrics.aurc(stack(good.flip(0)), y) == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)


@pytest.mark.parametrize("scale", [0.01, 1.0, 1e6])
def test_ood_auroc_against_scikit_learn_whatever_the_scale(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    # Rounded, so that there are ties; at scale 10⁶ a sigmoid would turn every score into one.
    a = (torch.randn(200, generator=generator) * 2).round() * scale
    b = (torch.randn(100, generator=generator) * 2 + 1).round() * scale
    expected = sk.roc_auc_score([0] * 200 + [1] * 100, torch.cat([a, b]).numpy())
    assert metrics.ood_auroc(a, b) == pytest.approx(expected, abs=1e-6)
    assert metrics.ood_auroc(b, a) == pytest.approx(1 - expected, abs=1e-6)


def test_ood_auroc_at_its_ends() -> None:
    low, high = torch.tensor([0.1, 0.2]), torch.tensor([5.0, math.inf])
    assert metrics.ood_auroc(low, high) == 1
    assert metrics.ood_auroc(high, low) == 0
    assert metrics.ood_auroc(low, low) == pytest.approx(0.5)
    assert metrics.ood_auroc(torch.zeros(3), torch.zeros(2)) == pytest.approx(0.5)


def test_ood_auroc_against_the_normal_law_and_torchmetrics() -> None:
    """Scores N(0, 1) and N(d, 1): AUROC = Φ(d/√2), and FPR95 = Φ(1.645 − d)."""
    from torchmetrics.functional.classification import binary_auroc

    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(40_000, generator=generator), torch.randn(40_000, generator=generator) + 1.5
    normal = torch.distributions.Normal(0.0, 1.0)
    assert metrics.ood_auroc(a, b) == pytest.approx(float(normal.cdf(torch.tensor(1.5 / math.sqrt(2)))), abs=0.006)
    assert metrics.ood_fpr(a, b) == pytest.approx(float(normal.cdf(torch.tensor(1.6449 - 1.5))), abs=0.015)
    target = torch.cat([torch.zeros(40_000), torch.ones(40_000)]).long()
    theirs = float(binary_auroc(torch.cat([a, b]).sigmoid().double(), target))
    assert metrics.ood_auroc(a, b) == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize(("n", "m", "accepted"), [(200, 100, 0.95), (20, 7, 0.95), (19, 30, 0.5), (3, 3, 1.0)])
def test_ood_fpr_is_a_point_of_scikit_learns_curve(n: int, m: int, accepted: float) -> None:
    generator = torch.Generator().manual_seed(n)
    a, b = ((torch.randn(k, generator=generator) * 2 + shift).round() for k, shift in ((n, 0), (m, 1)))
    # Ordinary inputs are the positives, and a low score means ordinary.
    fpr, tpr, _ = sk.roc_curve([1] * n + [0] * m, -torch.cat([a, b]).numpy(), drop_intermediate=False)
    assert metrics.ood_fpr(a, b, accepted) == pytest.approx(float(fpr[tpr >= accepted - 1e-9][0]), abs=1e-9)


def test_ood_fpr_at_its_ends() -> None:
    low, high = torch.arange(20.0), torch.arange(100.0, 110.0)
    assert metrics.ood_fpr(low, high) == 0
    assert metrics.ood_fpr(high, low) == 1
    assert metrics.ood_fpr(torch.zeros(5), torch.zeros(4)) == 1  # who cannot tell lets everything pass
    assert metrics.ood_fpr(low, torch.tensor([17.5, 18.0, 18.5, 19.0])) == 0.5  # 19 of 20 pass at 18, not at 17.5


def test_accuracy_at_coverage_is_that_of_the_most_confident() -> None:
    p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4], [0.45, 0.55]])
    y = torch.tensor([0, 1, 1, 0, 0])  # right, wrong, right, right, wrong, by falling confidence
    for coverage, expected in ((0.2, 1.0), (0.3, 0.5), (0.4, 0.5), (0.6, 2 / 3), (0.8, 0.75), (1.0, 0.6)):
        assert metrics.accuracy_at_coverage(p, y, coverage) == pytest.approx(expected)
    assert metrics.accuracy_at_coverage(p, y, 1e-9) == 1.0
    # Σ_k risk_k / N in closed form: 0, 1/2, 1/3, 1/4, 2/5
    assert metrics.aurc(p, y) == pytest.approx((0 + 1 / 2 + 1 / 3 + 1 / 4 + 2 / 5) / 5)
    for wrong in (0.0, 1.1, math.nan):
        with pytest.raises(ArgumentError, match="coverage"):
            metrics.accuracy_at_coverage(p, y, wrong)
    with pytest.raises(ArgumentError, match="accepted=2"):
        metrics.ood_fpr(torch.ones(2), torch.ones(2), 2)


def test_a_certain_mistake_is_bad_and_not_infinite() -> None:
    p = torch.tensor([[1.0, 0.0]])
    assert metrics.nll(p, torch.tensor([1])) == pytest.approx(87.3, abs=0.1)
    assert metrics.nll(p.double(), torch.tensor([1])) == pytest.approx(708.4, abs=0.1)
    assert metrics.nll(p, torch.tensor([0])) == 0


def test_evaluate_is_the_functions_together() -> None:
    scores = metrics.evaluate(P, Y)
    assert list(scores) == [
        "accuracy", "majority_accuracy", "balanced_accuracy", "auroc", "average_precision", "nll", "brier", "ece",
        "adaptive_ece", "aurc",
    ]  # fmt: skip
    assert all(type(value) is float and value == getattr(metrics, name)(P, Y) for name, value in scores.items())


@given(st.integers(0, 1000), st.integers(2, 4), st.booleans())
@settings(max_examples=25, deadline=None)
def test_scores_of_classes_are_those_of_scikit_learn(seed: int, c: int, ties: bool) -> None:
    """All classes occur, one of them rarely; with ties where probabilities are rounded."""
    from sklearn import metrics as sklearn

    p, y = problem(60, c, seed, 2.0)
    if ties:
        p = ((5 * p).round() + 1) / ((5 * p).round() + 1).sum(-1, keepdim=True)
    y = torch.where(torch.arange(60) % 10 > 0, y.clamp_max(c - 2), c - 1)
    y[: c - 1] = torch.arange(c - 1)
    found, given = metrics.class_scores(p, y), p.argmax(-1)
    for k in range(c):
        is_it, score = (y == k).numpy(), p[:, k].numpy()
        assert float(found.auroc[k]) == pytest.approx(sklearn.roc_auc_score(is_it, score), abs=1e-9)
        assert float(found.average_precision[k]) == pytest.approx(
            sklearn.average_precision_score(is_it, score), abs=1e-9
        )
        assert float(found.recall[k]) == pytest.approx(sklearn.recall_score(is_it, given == k), abs=1e-12)
        if (given == k).any():
            assert float(found.precision[k]) == pytest.approx(sklearn.precision_score(is_it, given == k), abs=1e-12)
        else:
            assert found.precision[k].isnan()
    assert metrics.balanced_accuracy(p, y) == pytest.approx(sklearn.balanced_accuracy_score(y, given), abs=1e-12)
    assert found.count.tolist() == [int((y == k).sum()) for k in range(c)]
    assert found.predicted.sum() == 60


def test_a_constant_answer_has_the_baselines_scores() -> None:
    """As a model that never flags the rare class: right as often as the baseline, and worth nothing."""
    p, y = torch.tensor([[0.9, 0.1]]).expand(200, 2), torch.tensor([0] * 170 + [1] * 30)
    scores = metrics.evaluate(p, y)
    assert scores["accuracy"] == scores["majority_accuracy"] == pytest.approx(0.85)
    assert (scores["balanced_accuracy"], scores["auroc"]) == (0.5, 0.5)
    assert metrics.class_scores(p, y).average_precision.tolist() == pytest.approx([0.85, 0.15])
    only = metrics.evaluate(p[:170], y[:170])
    assert math.isnan(only["auroc"])
    assert only["balanced_accuracy"] == 1.0
    withheld = metrics.class_scores(p, y, torch.full((200,), -1))
    assert withheld.predicted.tolist() == [0, 0]
    assert withheld.recall.tolist() == [0.0, 0.0]


@given(st.integers(1, 40), st.integers(2, 6), st.integers(0, 10_000), st.floats(0.0, 60.0))
@settings(max_examples=30, deadline=None)
def test_bounds(n: int, c: int, seed: int, scale: float) -> None:
    p, y = problem(n, c, seed, scale)
    p = p.float()
    scores = metrics.evaluate(p, y)
    for name in ("accuracy", "balanced_accuracy", "ece", "adaptive_ece", "aurc"):
        assert -1e-6 <= scores[name] <= 1 + 1e-6
    assert 0 <= scores["brier"] <= 2 + 1e-6
    assert 0 <= scores["nll"] < 88
    assert scores["accuracy"] == pytest.approx(float((p.argmax(-1) == y).double().mean()), abs=1e-6)
    # |mean accuracy − mean confidence| is what one bin gives, and finer bins can only add to it.
    gap = abs(scores["accuracy"] - float(p.double().max(-1).values.mean()))
    assert scores["ece"] >= gap - 1e-5
    assert scores["adaptive_ece"] >= gap - 1e-5


@given(st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_order_does_not_matter_without_ties(seed: int) -> None:
    order = torch.randperm(len(P), generator=torch.Generator().manual_seed(seed))
    shuffled = metrics.evaluate(P[order], Y[order])
    assert shuffled == pytest.approx(metrics.evaluate(P, Y), abs=1e-6, nan_ok=True)


@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        (torch.zeros(0, 3), torch.zeros(0).long(), r"probs\.shape=\(0, 3\)"),
        (torch.ones(3), torch.zeros(3).long(), r"probs\.shape=\(3,\)"),
        (torch.ones(3, 1), torch.zeros(3).long(), r"probs\.shape=\(3, 1\)"),
        (torch.tensor([[1, 0]]), torch.tensor([0]), r"probs\.dtype=torch\.int64"),
        (P, Y[:-1], r"labels\.shape=\(299,\).*\(300,\)"),
        (P, torch.nn.functional.one_hot(Y), r"labels\.shape=\(300, 4\).*one-hot"),
        (P, Y.float(), r"labels\.dtype=torch\.float32"),
        (P, Y + 1, "labels=4.*0 to 3"),
        (P, Y - 1, "labels=-1.*0 to 3"),
        (P.log(), Y, "probs=.*softmax"),
        (torch.full((2, 2), math.nan), torch.tensor([0, 1]), "probs='NaN'"),
        (torch.tensor([[0.5, 0.5], [0.5, 0.4]]), torch.tensor([0, 1]), "probs=0.9.*sum of a row"),
    ],
)
@pytest.mark.parametrize("score", [metrics.accuracy, metrics.nll, metrics.evaluate, metrics.reliability_bins])
def test_inputs_that_make_no_sense(
    score: Callable[[Tensor, Tensor], object], probs: Tensor, labels: Tensor, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        score(probs, labels)


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_ece_is_that_of_torchmetrics(bins: int) -> None:
    from torchmetrics.functional.classification import multiclass_calibration_error

    theirs = multiclass_calibration_error(P.float(), Y, num_classes=P.shape[1], n_bins=bins, norm="l1")
    assert metrics.ece(P, Y, bins) == pytest.approx(float(theirs), abs=1e-5)


@pytest.mark.parametrize("score", [metrics.ece, metrics.adaptive_ece, metrics.reliability_bins])
@pytest.mark.parametrize("bins", [0, 2.5, "many"])
def test_bins_are_a_positive_whole_number(score: Callable[..., object], bins: object) -> None:
    with pytest.raises(ArgumentError, match=f"bins={bins!r}"):
        score(P, Y, bins)


def test_scores_that_make_no_sense() -> None:
    with pytest.raises(ArgumentError, match=r"out_scores\.shape=\(0,\)"):
        metrics.ood_auroc(torch.ones(2), torch.ones(0))
    with pytest.raises(ArgumentError, match=r"in_scores\.shape=\(2, 1\)"):
        metrics.ood_auroc(torch.ones(2, 1), torch.ones(2))
    with pytest.raises(ArgumentError, match=r"in_scores.*NaN"):
        metrics.ood_auroc(torch.tensor([math.nan]), torch.ones(2))


@pytest.mark.parametrize(("right", "n"), [(0, 1), (1, 1), (3, 7), (50, 50), (123, 1000)])
def test_wilsons_interval_is_scipys(right: int, n: int) -> None:
    from scipy.stats import binomtest

    expected = binomtest(right, n).proportion_ci(0.95, "wilson")
    assert metrics.wilson(right / n, n) == pytest.approx((expected.low, expected.high), abs=1e-4)
