"""The scikit-learn estimators: manners, what they refuse to read off the data, and what they cost."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

import dpivon
from dpivon import ArgumentError, PrivacyWarning
from dpivon.bounds import Bounds
from dpivon.durable import ledger
from dpivon.integrations.sklearn import EXPECTED_FAILED_CHECKS, DPIVONClassifier, DPIVONRegressor
from dpivon.privacy.compiled import CompiledStep

QUICK: dict[str, Any] = {
    "epsilon": 8.0, "delta": 1e-3, "bounds": (-10, 10), "hidden": (), "epochs": 2, "samples": 4, "batch_size": 10_000,
}  # fmt: skip
# Round numbers at the ranges that the public description of this public data set states.
CANCER_HIGH = np.array([30, 40, 200, 2600, 0.2, 0.4, 0.5, 0.25, 0.4, 0.1, 3, 5, 25, 600, 0.04, 0.2, 0.4, 0.06, 0.1, 0.03,
                        40, 50, 260, 4300, 0.25, 1.1, 1.3, 0.3, 0.7, 0.25])  # fmt: skip


@pytest.fixture(scope="module")
def cancer():
    x, y = load_breast_cancer(return_X_y=True)
    return x[:450], y[:450], x[450:], y[450:]


def classifier(**options: Any) -> DPIVONClassifier:
    return DPIVONClassifier(**{**QUICK, "classes": [0, 1], "bounds": (0, CANCER_HIGH), **options})


def failures(estimator: Any) -> dict[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(estimator, on_fail=None, on_skip=None)
    return {r["check_name"]: repr(r["exception"]) for r in results if r["status"] == "failed"}


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize(
    "estimator",
    [
        DPIVONClassifier(classes="public", **QUICK),
        DPIVONRegressor(target_bounds=(-10, 10), **QUICK),
        pytest.param(DPIVONRegressor(target_bounds=(-10, 10), allow_nan=True, **QUICK), marks=pytest.mark.slow),
    ],
    ids=lambda e: type(e).__name__,
)
def test_every_check_of_scikit_learn_passes(estimator):
    assert failures(estimator) == {}


@pytest.mark.slow
def test_with_stated_classes_just_the_explained_checks_fail():
    assert failures(DPIVONClassifier(classes=[0, 1, 2], **QUICK)).keys() == EXPECTED_FAILED_CHECKS.keys()


@pytest.mark.filterwarnings("ignore::dpivon.PrivacyWarning")
def test_it_learns_within_the_budget(cancer):
    x, y, test_x, test_y = cancer
    # lr for these 450 rows; bounds and classes are public
    private = classifier(epochs=30, batch_size=64, lr=0.5, delta=1e-4, hidden=(16,), samples=16, random_state=0)
    private.fit(x, y)
    assert private.score(test_x, test_y) > 0.85  # 0.77 are of one class
    plan = dpivon.budget(dataset_size=450, batch_size=64, epochs=30, delta=1e-4, target_epsilon=8.0)
    assert private.budget_ == plan
    assert private.epsilon_ == plan.epsilon <= 8.0
    assert private.n_iter_ == plan.steps == 30 * 8
    probs = private.predict_proba(test_x)
    np.testing.assert_array_equal(probs, private.predict_proba(test_x))
    np.testing.assert_allclose(probs[7:8], private.predict_proba(test_x[7:8]), rtol=1e-5)  # its company does not matter


def test_the_fit_is_dpivons_own(cancer):
    """Weights from the estimator are those of dpivon.fit on the rows scaled by hand, from the same first weights."""
    x, y = cancer[0], cancer[1]
    first = torch.nn.Linear(30, 2)
    seeds = np.random.RandomState(5).randint(2**62, size=3, dtype=np.int64)

    def network(features: int, outputs: int) -> torch.nn.Module:
        assert (features, outputs) == (30, 2)
        return torch.nn.Sequential(first)

    with pytest.warns(PrivacyWarning, match="random_state=5: decides the privacy noise"):
        ours = classifier(network=network, batch_size=50, dataset_size=500, random_state=5).fit(x, y)
    scaled = np.clip(x, 0, CANCER_HIGH) / CANCER_HIGH * 2 - 1
    theirs = dpivon.fit(
        torch.nn.Sequential(first), torch.tensor(scaled, dtype=torch.float32), torch.tensor(y), lr=3.5, batch_size=50,
        epochs=2, delta=1e-3, target_epsilon=8.0, seed=int(seeds[1]), dataset_size=500, method="dp-steady",
    )  # fmt: skip
    assert ours.budget_ == theirs.budget
    assert ours.budget_.sample_rate == 0.1  # of the stated N, not of the 450 rows
    for name, mean in theirs.posterior.mean.items():
        torch.testing.assert_close(ours.posterior_.mean[name], mean)
        torch.testing.assert_close(ours.posterior_.variance[name], theirs.posterior.variance[name])


def test_regression_states_its_uncertainty():
    x, y = load_diabetes(return_X_y=True)
    private = DPIVONRegressor(
        epsilon=8.0, delta=1e-3, bounds=(-0.2, 0.2), target_bounds=(0, 400), noise_std=0.3, hidden=(), epochs=40, lr=0.3,
        batch_size=64, method="dp-ivon-gradsq",
    )  # fmt: skip
    private.fit(x[:350], y[:350])
    mean, std = private.predict(x[350:], return_std=True)
    assert private.score(x[350:], y[350:]) > 0.1
    assert (std >= 0.3 * 200).all()  # at least the likelihood's own width, in units of y
    assert (np.abs(mean - y[350:]) < 2 * std).mean() > 0.8
    np.testing.assert_array_equal(mean, private.predict(x[350:]))
    low, high = private.predict_interval(x[350:])
    np.testing.assert_allclose(high - low, 2 * 1.96 * std, rtol=1e-4)


@pytest.mark.slow
def test_missing_values_and_a_learned_noise():
    """Half of one feature is missing: taken if that was declared, refused if not. The noise is 1 in a range of 20."""
    draw = np.random.default_rng(0)
    x = draw.uniform(-1, 1, (500, 2))
    y = 8 * x[:, 0] + draw.normal(0, 1, 500)
    x[::2, 1] = np.nan
    known = {"epsilon": 8.0, "delta": 1e-4, "bounds": (-1, 1), "target_bounds": (-10, 10), "hidden": (), "lr": 0.2}
    known |= {"method": "dp-ivon-gradsq"}
    with pytest.raises(ValueError, match="NaN"):
        DPIVONRegressor(**known).fit(x, y)
    private = DPIVONRegressor(**known, noise_std="learned", allow_nan=True, batch_size=64, epochs=15).fit(x, y)
    assert private.model_[0].in_features == 4
    assert private.score(x, y) > 0.8
    _, std = private.predict(x, return_std=True)
    assert 0.8 < np.median(std) < 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bounds": None}, "bounds=None.*private unless you state it"),
        ({"bounds": (0, np.ones(3))}, "bounds=.*30 feature"),
        ({"bounds": (1, 1)}, "bounds=.*low < high"),
        ({"classes": None}, "classes=None.*private unless you state"),
        ({"classes": [1, 2]}, r"classes=\[1, 2\].*not among them"),
        ({"classes": [1]}, "classes=.*two classes"),
        ({"epsilon": None}, "epsilon=None"),
        ({"delta": None}, "delta=None"),
        ({"hidden": (0,)}, "hidden=0"),
        ({"dataset_size": 0}, "dataset_size=0"),
    ],
)
def test_what_must_be_public_must_be_stated(cancer, options, message):
    with pytest.raises(ArgumentError, match=message):
        classifier(**options).fit(cancer[0], cancer[1])


def test_a_target_range_must_be_stated(cancer):
    with pytest.raises(ArgumentError, match="target_bounds=None"):
        DPIVONRegressor(**QUICK).fit(cancer[0], cancer[1])


def test_a_person_with_many_rows_is_one_of_n(cancer):
    x, y, *_ = cancer
    ids = np.arange(len(x)) // 9
    fitted = classifier(rows_per_user=4, epochs=1).fit(x, y, user_ids=ids)
    assert (fitted.budget_.dataset_size, fitted.budget_.batch_size) == (50, 50)
    with pytest.raises(ArgumentError, match="user_ids=None"):
        classifier(rows_per_user=4).fit(x, y)
    with pytest.raises(ArgumentError, match="449 ids"):
        classifier().fit(x, y, user_ids=ids[1:])


def test_a_fit_is_kept_in_a_folder_and_the_same_call_goes_on(cancer, tmp_path, monkeypatch):
    x, y, test_x, _ = cancer
    steps, step = [], CompiledStep.__call__

    def dies(self: CompiledStep, batch: Any) -> Any:
        steps.append(1)
        if len(steps) == 8:
            raise KeyboardInterrupt
        return step(self, batch)

    monkeypatch.setattr(CompiledStep, "__call__", dies)
    given = {"out": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        classifier(batch_size=90).fit(x, y, **given)
    assert ledger.read(tmp_path / "run" / "ledger.jsonl").releases == 7
    fitted = classifier(batch_size=90).fit(x, y, **given)
    assert (fitted.n_iter_, fitted.path_) == (10, "eager (on cpu)")
    assert (
        ledger.read(tmp_path / "run" / "ledger.jsonl").releases == 10
    )  # the lost steps were repeated, not charged again
    made, again = len(steps), classifier(batch_size=90).fit(x, y, **given)
    assert len(steps) == made  # finished: nothing is trained or charged
    for name, mean in fitted.posterior_.mean.items():
        assert torch.equal(again.posterior_.mean[name], mean)
    with pytest.raises(ArgumentError, match="begun with other arguments"):
        classifier(batch_size=80).fit(x, y, **given)
    assert fitted.predict(test_x).shape == (len(test_x),)


def test_weights_of_examples_are_refused(cancer):
    x, y = cancer[:2]
    with pytest.raises(ArgumentError, match=r"sample_weight=.*before it is clipped"):
        classifier().fit(x, y, sample_weight=np.ones(len(x)))


def test_a_row_far_away_changes_no_other_rows_input():
    """A data-dependent scaler would squeeze all rows for one outlier."""
    bounds = Bounds.check("bounds", (0, [1, 10]), 2)
    rows = np.array([[0.5, 5.0], [1.0, 0.0]])
    with_outlier = np.vstack([rows, [[1e300, -1e300]]])
    np.testing.assert_array_equal(bounds.scale(with_outlier)[:2], bounds.scale(rows))
    np.testing.assert_array_equal(bounds.scale(with_outlier), [[0, 0], [1, -1], [1, -1]])
    np.testing.assert_allclose(bounds.unscale(bounds.scale(rows)), rows)


def test_a_search_is_warned_of_what_it_costs(cancer):
    x, y = cancer[:2]
    search = GridSearchCV(classifier(), {"lr": [0.1, 1.0]}, cv=2)
    with pytest.warns(PrivacyWarning, match="dpivon budget --tuning") as caught:
        search.fit(x, y)
    messages = [str(w.message) for w in caught if "at fit" in str(w.message)]
    assert any(
        "at fit 5. Together they spend up to ε = 5 × 8.0" in m for m in messages
    )  # 2 × 2 folds, and the best again
    with pytest.warns(PrivacyWarning, match="at fit 2"):
        cross_val_score(classifier(), x, y, cv=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clone(classifier()).fit(x, y)  # one fit of one clone costs what it says
    with pytest.warns(PrivacyWarning, match="at fit 2"):
        classifier().fit(x, y).fit(x, y)


def test_a_clone_in_another_process_still_knows_its_family(cancer):
    original = classifier()
    clones = [pickle.loads(pickle.dumps(clone(original))) for _ in range(2)]
    with pytest.warns(PrivacyWarning, match="at fit 2"):
        clones[1].fit(*cancer[:2])


def test_it_ends_a_pipeline(cancer):
    x, y, test_x, _ = cancer
    pipeline = make_pipeline(FunctionTransformer(np.log1p), classifier(bounds=(0, np.log1p(CANCER_HIGH))))
    assert pipeline.fit(x, y).predict(test_x).shape == (len(test_x),)
    assert set(pipeline.named_steps) == {"functiontransformer", "dpivonclassifier"}


@pytest.mark.filterwarnings("ignore::dpivon.PrivacyWarning")
def test_a_pickle_holds_no_rows_and_no_seed(cancer):
    x, y, test_x, _ = cancer
    seed = 987654321
    private = classifier(random_state=seed).fit(x, y)
    data = pickle.dumps(private)
    loaded = pickle.loads(data)
    np.testing.assert_array_equal(loaded.predict_proba(test_x), private.predict_proba(test_x))
    assert loaded.random_state is None
    assert private.random_state == seed
    assert seed.to_bytes(4, "little") in pickle.dumps(classifier(random_state=seed))  # so this would find it
    assert seed.to_bytes(4, "little") not in data
    derived = np.random.RandomState(seed).randint(2**62, size=3, dtype=np.int64)[1]
    assert int(derived).to_bytes(8, "little") not in data
    for row in x[:20]:
        assert row.tobytes() not in data


def test_a_folder_is_not_reused_with_other_bounds_or_rows(cancer, tmp_path):
    """What was learned on features of one scale would be asked about those of another."""
    x, y, _, _ = cancer
    fitted = classifier().fit(x, y, out=tmp_path)
    again = classifier().fit(x, y, out=tmp_path)
    for one, other in zip(again.model_.parameters(), fitted.model_.parameters(), strict=True):
        assert torch.equal(one, other)
    for changed, rows in ((classifier(bounds=(0, 2 * CANCER_HIGH)), x), (classifier(), x[::-1].copy())):
        with pytest.raises(ArgumentError, match="out="):
            changed.fit(rows, y, out=tmp_path)


def test_nor_with_another_noise_of_the_target(tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 3))
    options = QUICK | {"target_bounds": (-4, 4), "epochs": 1}
    DPIVONRegressor(noise_std=0.1, **options).fit(x, x[:, 0], out=tmp_path)
    assert DPIVONRegressor(noise_std=0.1, **options).fit(x, x[:, 0], out=tmp_path).noise_.std == 0.1
    with pytest.raises(ArgumentError, match=r"out=.*other arguments"):
        DPIVONRegressor(noise_std=2.0, **options).fit(x, x[:, 0], out=tmp_path)
