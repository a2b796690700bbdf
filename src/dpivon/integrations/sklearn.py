"""Private classifiers and regressors with scikit-learn's manners: fit, predict, predict_proba, score, clone, pipelines.

What scikit-learn reads off the data has to be stated here, because it would be released without noise: the range of the
features (``bounds``), the labels that exist (``classes``), the range of the target (``target_bounds``).

Where a private method cannot behave as ``check_estimator`` expects, and why, is :data:`EXPECTED_FAILED_CHECKS`.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin, is_classifier
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from dpivon.bounds import Bounds
from dpivon.defaults import METHOD, OF_NUMBERS, TableDefaults, table_defaults
from dpivon.errors import PrivacyWarning, bad, check_number, check_whole
from dpivon.fit import Fitted, Loss, fit
from dpivon.gaussian import GaussianNoise, interval, unscaled
from dpivon.integrations.fit_count import CountsFits
from dpivon.methods import describe
from dpivon.models import TableMLP
from dpivon.multilabel import multilabel_loss
from dpivon.predict import RegressionPrediction
from dpivon.privacy.people import People
from dpivon.sources.columns import Array, scaled
from dpivon.stacked.networks import cross_entropy

#: Checks of scikit-learn that fail with stated classes, with the reason of each. With ``classes="public"`` none does. Three
#: things are not checked at all, because the estimator says that it does not do them: a good score on a few dozen rows
#: (``poor_score``: the noise is larger than the signal there), sample weights, and sparse input.
EXPECTED_FAILED_CHECKS = {
    "check_classifiers_classes": "expects the labels to be learnt from y, once as text; they are stated, and others refused",
    "check_dtype_object": "the same: its labels are not the stated ones",
    "check_classifiers_train": "expects a column a label that occurs in y; a stated class has one whether it occurs or not",
}


class _Private(CountsFits):
    """What classifier and regressor share: public scaling, one call of :func:`dpivon.fit`, fixed posterior draws."""

    epsilon: float | None
    delta: float | None
    bounds: Any
    dataset_size: int | None
    allow_nan: bool
    hidden: Any
    network: Callable[[int, int], nn.Module] | None
    batch_size: int | None
    epochs: int | None
    lr: float | None
    max_grad_norm: float | None
    rows_per_user: int | None
    method: str | None
    options: Any
    samples: int
    device: Any
    random_state: Any
    _several = False  # labels to predict

    def _keep(self, given: dict[str, Any]) -> None:
        """The parameters of ``__init__`` as attributes of the same names, which is what scikit-learn wants."""
        self.__dict__ |= {name: value for name, value in given.items() if name not in ("self", "__class__")}

    # ---- training

    def _train(
        self, X: Array, target: Tensor, outputs: int, loss: Loss, user_ids: Any, out: Any, not_supported: dict[str, Any]
    ) -> None:
        for name, value in not_supported.items():
            if value is not None:
                problem = "is not supported: a weight would scale an example's gradient before it is clipped"
                raise bad(name, type(value).__name__, problem, "Leave it out; every example counts alike")
        epsilon = check_number("epsilon", self.epsilon, "Pass the ε you may spend, such as epsilon=3.0", above=0.0)
        delta = check_number("delta", self.delta, "Pass a δ well below 1/N, such as 1e-5", above=0.0, below=1.0)
        people = People.given(user_ids, self.rows_per_user)
        known = len(X if people is None else people) if self.dataset_size is None else self.dataset_size
        n = check_whole(
            "dataset_size", known, "Pass the public N, or None where the exact number is public", at_least=1
        )
        plan = self._settings(n, epsilon)
        b = check_whole("batch_size", plan.batch_size, "Pass the expected number of examples in a batch", at_least=1)
        bounds = Bounds.check("bounds", self.bounds, X.shape[1])
        self._note_fit()
        model_seed, noise_seed, predict_seed = self._seeds()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(model_seed)
            model = self._model(plan, X.shape[1] * (2 if self.allow_nan else 1), outputs)
        inputs = self._encoded(X, bounds)
        fitted = fit(
            model.to(self.device),
            inputs.to(self.device),
            target.to(self.device),
            lr=plan.lr,
            batch_size=min(b, n),
            epochs=plan.epochs,
            delta=delta,
            target_epsilon=epsilon,
            max_grad_norm=plan.max_grad_norm,
            dataset_size=n,
            method=plan.method,
            options=self.options,
            loss=loss,
            seed=noise_seed,
            user_ids=people,
            progress=False,
            out=out,
        )
        self.bounds_, self.predict_seed_ = bounds, predict_seed
        self.model_, self.posterior_, self.budget_ = fitted.model, fitted.posterior, fitted.budget
        self.epsilon_, self.n_iter_, self.path_ = fitted.epsilon, fitted.budget.steps, fitted.path

    def _read(self, X: Any, *y: Any, **options: Any) -> Any:
        return validate_data(self, X, *y, ensure_all_finite="allow-nan" if self.allow_nan else True, **options)

    def _encoded(self, X: Array, bounds: Bounds) -> Tensor:
        """Scaled by public bounds; with ``allow_nan`` a missing value is the middle, and one indicator more per feature."""
        inputs = np.concatenate(scaled(X, bounds), axis=1) if self.allow_nan else bounds.scale(X)
        return torch.as_tensor(inputs, dtype=torch.float32)

    def _settings(self, n: int, epsilon: float) -> TableDefaults:
        """What was given, and for the rest the rule for tables; else a small network."""
        if self.method is None and self.lr is None and self.network is None and is_classifier(self):
            rule = table_defaults(n, epsilon, self.batch_size)
        else:
            method = describe(self.method or METHOD)
            lr = method.lr * (1.0 if is_classifier(self) else OF_NUMBERS) if self.lr is None else self.lr
            rule = TableDefaults(method.name, "mlp", (64,), 1.0, lr, 256, 20)
        names = ("hidden", "batch_size", "epochs", "max_grad_norm")
        return replace(rule, **{name: getattr(self, name) for name in names if getattr(self, name) is not None})

    def _model(self, plan: TableDefaults, features: int, outputs: int) -> nn.Module:
        if self.network is not None:
            return self.network(features, outputs)
        if plan.network == "table":
            return TableMLP(features, outputs, plan.hidden)
        layers: list[nn.Module] = []
        for width in plan.hidden:
            width = check_whole("hidden", width, "Pass the widths of the hidden layers, such as (64,)", at_least=1)
            layers += [nn.Linear(features, width), nn.Tanh()]
            features = width
        return nn.Sequential(*layers, nn.Linear(features, outputs))

    def _seeds(self) -> tuple[int, int | None, int]:
        """Of the first weights, of batches and noise, of the posterior draws in predictions."""
        if self.random_state is None:  # numpy's global state is no secret; the operating system's is
            return secrets.randbits(62), None, secrets.randbits(62)
        warnings.warn(
            f"random_state={self.random_state!r}: decides the privacy noise, so whoever knows it can take the noise away, and "
            "two fits that share it share their noise. Leave it out unless the data is public.",
            PrivacyWarning,
            stacklevel=4,
        )
        draw = check_random_state(self.random_state)
        return tuple(int(s) for s in draw.randint(2**62, size=3, dtype=np.int64))  # type: ignore[return-value]

    # ---- predicting

    def _predict(self, X: Any, **options: Any) -> Any:
        check_is_fitted(self, "posterior_")
        inputs = self._encoded(self._read(X, reset=False), self.bounds_)
        # The same draws every time: a row's prediction does not depend on its company or on the call.
        generator = torch.Generator().manual_seed(self.predict_seed_)
        fitted = Fitted(self.model_, self.posterior_, self.budget_)
        options = {"likelihood": "multilabel" if self._several else "categorical"} | options
        return fitted.predict(inputs, samples=self.samples, generator=generator, **options)

    def __getstate__(self) -> Any:
        """What was released, and the parameters, without the seed of the noise: a fitted estimator is made to be shared."""
        state = dict(super().__getstate__())
        if "posterior_" in state:
            state["random_state"] = None
        return state


class _Tags:
    """What scikit-learn should know, said after the mixins of a classifier or a regressor."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        tags.input_tags.allow_nan = bool(self.allow_nan)  # type: ignore[attr-defined]
        (tags.classifier_tags or tags.regressor_tags).poor_score = True  # on a hundred rows noise exceeds the signal
        if tags.classifier_tags is not None:
            tags.classifier_tags.multi_label = isinstance(self.classes, str) or np.size(self.classes) == 2  # type: ignore[attr-defined]
        return tags


class DPIVONClassifier(_Tags, ClassifierMixin, _Private):  # type: ignore[misc]
    """A Bayesian neural network trained under (ε, δ)-differential privacy, as a scikit-learn classifier.

    >>> classifier = DPIVONClassifier(epsilon=3.0, delta=1e-5, classes=[0, 1], bounds=(0.0, 100.0))
    >>> classifier.fit(X, y).predict_proba(X_test)

    Args:
        epsilon: the budget of one ``fit``, for adding or removing one row; with ``fit(X, y, user_ids=…)`` one person with all
            their rows, and ``dataset_size`` and ``batch_size`` count people. Must be given.
        delta: the δ of that budget, well below one over the number of rows. Must be given.
        classes: the labels that exist; stated, because which labels occur in ``y`` is private. ``"public"`` says that it is
            not, and takes them from ``y``. With ``y`` [n, labels] (multi-label) two for all, the second is yes.
        bounds: (low, high) of the features, numbers or one a feature, known without the data. Values are clamped to
            them and mapped to [−1, 1]. Must be given. Do not put a StandardScaler before this: it learns from private rows.
        dataset_size: the public N; None if ``len(X)`` is public.
        allow_nan: take NaN for a missing value: it is the middle of its range, with an indicator of its own, which doubles
            the inputs. Declared, because whether a value is missing anywhere is private.
        hidden: widths of the hidden layers; () is logistic regression. This and every other argument that is None follows from
            N and ε by ``dpivon.defaults.table_defaults``, unless you give a method, a step size or a network.
        network: ``network(features, outputs)`` makes a model of your own instead.
        batch_size: the expected batch, at most N.
        epochs: as in :func:`dpivon.fit`, like the next four.
        lr: step size; with a ``method``, None takes that method's.
        max_grad_norm: C.
        rows_per_user: with ``user_ids``, at most so many rows of a person in a step, drawn afresh; None for all.
        method: one of ``dpivon methods`` that can be stacked.
        options: the method's own, by name.
        samples: posterior draws that a prediction averages.
        device: where to train.
        random_state: decides first weights, batches, noise and posterior draws. It is a secret, and using one is warned of:
            leave it None unless the data is public.

    After ``fit``: ``classes_``, ``posterior_``, ``model_``, ``budget_``, ``epsilon_`` (spent), ``n_iter_`` (steps), ``path_``
    (captured, or eager with the reason).

    Every fit spends ε anew. GridSearchCV, cross_val_score and the like fit many times: a warning says what that adds up to,
    and `dpivon budget --tuning` what choosing the best costs. ``score`` is not private: use it on public or test rows.
    ``sample_weight`` is refused. A pickle holds parameters and released values, never rows, and of a fitted estimator not
    the seed; like every pickle, load it only from where you trust. ``posterior_.save`` writes a file that cannot hold code.
    """

    classes: Any

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        classes: Any = None,
        bounds: Any = None,
        dataset_size: int | None = None,
        allow_nan: bool = False,
        hidden: Any = None,
        network: Callable[[int, int], nn.Module] | None = None,
        batch_size: int | None = None,
        epochs: int | None = None,
        lr: float | None = None,
        max_grad_norm: float | None = None,
        rows_per_user: int | None = None,
        method: str | None = None,
        options: Any = None,
        samples: int = 32,
        device: Any = "cpu",
        random_state: Any = None,
    ) -> None:
        self._keep(locals())

    def fit(self, X: Any, y: Any, user_ids: Any = None, out: Any = None, **not_supported: Any) -> DPIVONClassifier:
        """Train within (ε, δ), for one row or, with the id of every row's person, for one person with all their rows.

        ``out`` keeps the run in a folder, as :func:`dpivon.fit` does: the same call goes on where it was stopped.
        """
        several = np.asarray(y).ndim == 2 and np.asarray(y).shape[1] > 1
        X, y = self._read(X, y, multi_output=several)
        check_classification_targets(y)
        classes = self._classes(y)
        index = np.minimum(np.searchsorted(classes, y), len(classes) - 1)
        if not (classes[index] == y).all():
            problem = "y has labels that are not among them"
            raise bad("classes", self.classes, problem, "Name every label that may occur")
        outputs, loss = (index.shape[1], multilabel_loss) if several else (len(classes), cross_entropy)
        self._train(X, torch.as_tensor(index), outputs, loss, user_ids, out, not_supported)
        self.classes_, self._several = classes, several
        return self

    def _classes(self, y: Array) -> Array:
        if self.classes is None:
            problem = "which labels occur is private unless you state them"
            raise bad("classes", None, problem, "Pass the labels that exist, or classes='public' if that is no secret")
        public = isinstance(self.classes, str) and self.classes == "public"
        classes = np.unique(y if public else np.asarray(self.classes))
        if len(classes) < 2:
            raise bad("classes", self.classes, "there is only one class", "Name at least two classes")
        if y.ndim == 2 and len(classes) > 2:
            raise bad("classes", self.classes, "are not two, and each label is no or yes", "Pass two, such as (0, 1)")
        return classes

    def predict_proba(self, X: Any) -> Array:
        """Probabilities averaged over the posterior, by the order of ``classes_``; of several labels of yes, [n, labels]."""
        probs = self._predict(X).probs.double().cpu().numpy()
        return probs[..., 1] if self._several else probs / probs.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> Array:
        """The most probable class, of several labels for each."""
        probs = self.predict_proba(X)
        return self.classes_[(probs > 0.5).astype(int) if self._several else probs.argmax(axis=1)]


class DPIVONRegressor(_Tags, RegressorMixin, _Private):  # type: ignore[misc]
    """A Bayesian neural network trained under (ε, δ)-differential privacy, as a scikit-learn regressor.

    >>> regressor = DPIVONRegressor(epsilon=3.0, delta=1e-5, bounds=(0.0, 1.0), target_bounds=(0.0, 500.0))
    >>> mean, std = regressor.fit(X, y).predict(X_test, return_std=True)

    The likelihood is Gaussian. Args, besides those of :class:`DPIVONClassifier`:
        target_bounds: (low, high) of the target, known without the data; values are clamped to them. Must be given.
        noise_std: the width of the likelihood as a share of half that range, a public constant; or ``"learned"``, row by row,
            by a second output of the network.
    """

    target_bounds: Any
    noise_std: float | str

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        bounds: Any = None,
        target_bounds: Any = None,
        noise_std: float | str = 0.25,
        dataset_size: int | None = None,
        allow_nan: bool = False,
        hidden: Any = None,
        network: Callable[[int, int], nn.Module] | None = None,
        batch_size: int | None = None,
        epochs: int | None = None,
        lr: float | None = None,
        max_grad_norm: float | None = None,
        rows_per_user: int | None = None,
        method: str | None = None,
        options: Any = None,
        samples: int = 32,
        device: Any = "cpu",
        random_state: Any = None,
    ) -> None:
        self._keep(locals())

    def fit(self, X: Any, y: Any, user_ids: Any = None, out: Any = None, **not_supported: Any) -> DPIVONRegressor:
        """Train within (ε, δ), for one row or, with the id of every row's person, for one person with all their rows.

        ``out`` keeps the run in a folder, as :func:`dpivon.fit` does: the same call goes on where it was stopped.
        """
        X, y = self._read(X, y, y_numeric=True)
        target_bounds, noise = Bounds.check("target_bounds", self.target_bounds, 1), GaussianNoise.given(self.noise_std)
        target = torch.as_tensor(target_bounds.scale(y), dtype=torch.float32)
        self._train(X, target, noise.outputs, noise, user_ids, out, not_supported)
        self.target_bounds_, self.noise_ = target_bounds, noise
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """The mean of the posterior predictive; with ``return_std`` its standard deviation too, noise included."""
        found = self._found(X)
        mean = found.mean.cpu().numpy()
        return (mean, found.variance.sqrt().cpu().numpy()) if return_std else mean

    def predict_interval(self, X: Any) -> tuple[Array, Array]:
        """Low and high of the 95 % interval of each row."""
        low, high = interval(self._found(X))
        return low.cpu().numpy(), high.cpu().numpy()

    def _found(self, X: Any) -> RegressionPrediction:
        check_is_fitted(self, "posterior_")
        found = self._predict(X, likelihood="gaussian", noise_variance=self.noise_.moments)
        return unscaled(found, self.target_bounds_)


__all__ = ["EXPECTED_FAILED_CHECKS", "DPIVONClassifier", "DPIVONRegressor"]
