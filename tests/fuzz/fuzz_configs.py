"""Random configurations, good and bad in every mixture: each ends in success or in one of our errors, and ε is right.

What is drawn is a plain dictionary, so a failure prints as a call that can be repeated.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import dp_accounting
import torch
from dp_accounting.rdp import RdpAccountant
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon.errors import DpivonError
from dpivon.methods import METHODS
from dpivon.privacy.accounting import RandomRuns, epsilon, tuned_epsilon
from dpivon.stacked import AnyNetwork, Run, Stack

Options = dict[str, Any]
NAN, INF = math.nan, math.inf
ODD = (
    NAN,
    INF,
    -INF,
    -1,
    0,
    0.0,
    -0.5,
    1e-320,
    1e300,
    10**400,
    None,
    "x",
    "",
    [],
    (),
    {},
    True,
    2.5,
    torch.ones(2),
    b"1",
    1j,
)


WHOLE_ORDERS = (*map(float, range(2, 64)), 128.0, 256.0, 512.0)


def independent_epsilon(sigma: float, q: float, steps: int, delta: float) -> float:
    """Google's accountant, at whole orders: its series for fractional ones gives up too often to compare with."""
    accountant = RdpAccountant(WHOLE_ORDERS)
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
    accountant.compose(event, steps)
    return float(accountant.get_epsilon(delta))


def check_epsilon(found: float, sigma: float, q: float, steps: int, delta: float) -> None:
    """Ours is at most Google's, since we search more orders, and at the same orders the same."""
    if sigma == 0 or steps == 0:
        assert found == (math.inf if steps else 0.0), (found, sigma, q, steps, delta)
        return
    reference = independent_epsilon(sigma, q, steps, delta)
    assert found <= reference * (1 + 1e-3) + 1e-6, (found, reference, sigma, q, steps, delta)
    same_orders = epsilon([(sigma, q, steps)], delta, "rdp", orders=WHOLE_ORDERS)
    assert math.isclose(same_orders, reference, rel_tol=1e-3, abs_tol=1e-6), (
        same_orders,
        reference,
        sigma,
        q,
        steps,
        delta,
    )


def _mostly(rng: random.Random, good: Callable[[], Any], odds: float) -> Any:
    return rng.choice(ODD) if rng.random() < odds else good()


def _ours(call: Callable[[], Any]) -> tuple[str, Any]:
    """ "ok" with the result, or "refused"; anything else comes out."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return "ok", call()
    except DpivonError as error:
        message = str(error)
    assert "\n" not in message, message
    assert len(message) < 1500, len(message)
    return "refused", None


# ---- accounting


def draw_budget(rng: random.Random) -> Options:
    odds = rng.choice((0.0, 0.0, 0.15))
    n = rng.choice((1, 10, 1000, 50_000, 10**7))
    options: Options = {
        "dataset_size": _mostly(rng, lambda: n, odds),
        "batch_size": _mostly(rng, lambda: rng.randint(1, min(n, 5000)), odds),
        "delta": _mostly(rng, lambda: 10.0 ** -rng.randint(1, 9), odds),
        rng.choice(("epochs", "steps")): _mostly(rng, lambda: rng.choice((1, 7, 300)), odds),
        "noise_multiplier": _mostly(rng, lambda: rng.choice((0.3, 0.7, 1.0, 4.0, 30.0)), odds),
    }
    if rng.random() < 0.2:
        options["target_epsilon"] = _mostly(rng, lambda: rng.uniform(0.05, 20), odds)
        if rng.random() < 0.8:
            del options["noise_multiplier"]
    return options


def try_budget(options: Options) -> str:
    outcome, plan = _ours(lambda: dpivon.budget(accountant="rdp", **options))
    if outcome == "ok":
        if "target_epsilon" in options and options["target_epsilon"] is not None:
            assert plan.epsilon <= options["target_epsilon"]
        check_epsilon(plan.epsilon, plan.noise_multiplier, plan.sample_rate, plan.steps, plan.delta)
    return outcome


def draw_tuning(rng: random.Random) -> Options:
    odds = rng.choice((0.0, 0.2))
    law = rng.choice(("geometric", "logarithmic", "poisson", "negative-binomial"))
    shape = _mostly(rng, lambda: rng.uniform(-0.95, 3), odds) if law == "negative-binomial" else None
    return {"mean": _mostly(rng, lambda: rng.choice((1, 1.5, 10, 3000)), odds), "law": law, "shape": shape}


def try_tuning(options: Options) -> str:
    outcome, runs = _ours(lambda: RandomRuns(**options))
    if outcome == "ok":
        history = [(1.0, 0.02, 200)]
        assert tuned_epsilon(history, 1e-5, runs) >= epsilon(history, 1e-5, "rdp")
        assert runs.draw() >= (0 if runs.law == "poisson" else 1)
    return outcome


# ---- the engine


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 3),
    "mlp": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
    "norm": lambda: nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.ReLU(), nn.Linear(6, 3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)),
    "frozen": lambda: nn.Linear(4, 3).requires_grad_(False),
    "half": lambda: nn.Linear(4, 3).half(),
    "double": lambda: nn.Linear(4, 3).double(),
    "empty": nn.Identity,
    "dropout": lambda: nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)),
}
OPTIMIZERS: dict[str, Callable[[list[Any]], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "ivon": lambda p: dpivon.IVON(p, lr=0.1, ess=100.0),
    "ivon of two samples": lambda p: dpivon.IVON(p, lr=0.1, ess=100.0, mc_samples=2),
}


def draw_engine(rng: random.Random) -> Options:
    odds = rng.choice((0.0, 0.0, 0.1))
    modes = (None, "bookkeeping", "hooks", "functorch", "ew", "ghost")
    options: Options = {
        "noise_multiplier": _mostly(rng, lambda: rng.choice((0.0, 0.5, 1.0, 3.0)), odds),
        "max_grad_norm": _mostly(rng, lambda: rng.choice((0.1, 1.0, 10)), odds),
        "grad_sample_mode": _mostly(rng, lambda: rng.choice(modes), odds / 2),
    }
    extras: Options = {
        "clipping": rng.choice(("flat", "per_layer", "adaptive", "x", None)),
        "loss_reduction": _mostly(rng, lambda: rng.choice(("mean", "sum")), odds),
        "poisson_sampling": rng.choice((True, True, False)),
        "wrap_model": rng.choice((True, False)),
        "expected_batch_size": _mostly(rng, lambda: rng.choice((1, 4, 8, 8.5, 9)), odds),
        "dataset_size": _mostly(rng, lambda: rng.choice((7, 8, 100)), odds),
        "augmentations": _mostly(rng, lambda: rng.choice((1, 2)), odds),
        "batch_first": rng.choice((True, False)),
        "rand_on_empty": rng.choice((True, False)),
        "criterion": rng.choice((None, "mean", "sum", "weighted")),
        "noise_generator": rng.choice((None, "seeded")),
    }
    for name in rng.sample(sorted(extras), rng.randint(0, 3)):
        options[name] = extras[name]
    options |= {
        "model": rng.choice(sorted(MODELS)),
        "optimizer": rng.choice(sorted(OPTIMIZERS)),
        "seed": rng.randrange(999),
    }
    options |= {
        "accountant": _mostly(rng, lambda: rng.choice(("rdp", "rdp", "prv", "pld")), odds),
        "secure": rng.random() < 0.2,
    }
    return options


def try_engine(options: Options) -> str:
    options = dict(options)
    torch.manual_seed(options.pop("seed"))
    model = MODELS[options.pop("model")]()
    make = OPTIMIZERS[options.pop("optimizer")]
    params = list(model.parameters()) or [nn.Parameter(torch.zeros(1))]
    dtype = params[0].dtype
    data = TensorDataset(torch.randn(8, 4).to(dtype), torch.randint(3, (8,)))
    kinds = {"mean": nn.CrossEntropyLoss(), "sum": nn.CrossEntropyLoss(reduction="sum"), None: None}
    kinds["weighted"] = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 2.0], dtype=dtype))
    if "criterion" in options:
        options["criterion"] = kinds[options["criterion"]]
    if options.get("noise_generator") == "seeded":
        options["noise_generator"] = torch.Generator().manual_seed(1)
    accountant, secure = options.pop("accountant"), options.pop("secure")

    def run() -> Any:
        engine = dpivon.PrivacyEngine(accountant=accountant, secure_mode=secure)
        made = engine.make_private(
            module=model, optimizer=make(params), data_loader=DataLoader(data, batch_size=4), **options
        )
        private, optimizer, *criterion, loader = made
        private = model if options.get("wrap_model") is False else private
        reduction = optimizer.loss_reduction
        loss = criterion[0] if criterion else nn.CrossEntropyLoss(reduction=reduction)
        samples = (
            optimizer.original_optimizer.mc_samples if isinstance(optimizer.original_optimizer, dpivon.IVON) else 0
        )
        m = options.get("augmentations") or 1
        for i, (x, y) in enumerate(loader):
            if i == 2:
                break
            x, y = x.repeat_interleave(int(m), 0), y.repeat_interleave(int(m), 0)
            optimizer.zero_grad()
            for _ in range(max(samples, 1)):
                if samples:
                    with optimizer.sampled_params(train=True):
                        loss(private(x), y).backward()
                else:
                    loss(private(x), y).backward()
            optimizer.step()
        return engine, optimizer

    outcome, made = _ours(run)
    if outcome == "ok":
        engine, optimizer = made
        spec, steps = optimizer.spec, len(engine.accountant)
        assert steps in (1, 2)
        _, found = _ours(lambda: engine.get_epsilon(1e-5))
        if spec.unaccounted:
            assert found == math.inf
        elif accountant == "rdp":
            check_epsilon(found, spec.noise_multiplier, spec.sample_rate, steps, 1e-5)
        else:
            bound = epsilon([(spec.noise_multiplier, spec.sample_rate, steps)], 1e-5, "rdp")
            assert 0 < found <= bound * (1 + 1e-3) + 1e-6, (found, bound)
    return outcome


# ---- optimizers, methods, stacks, prediction


HYPER = ("lr", "ess", "hess_init", "beta1", "beta2", "weight_decay", "mc_samples", "clip_radius", "momentum", "nesterov",
         "eps", "nu", "floor", "cap", "relative_floor", "temperature", "ema", "curvature", "dropout", "prior_std", "burn_in",
         "thin", "keep", "nonsense")  # fmt: skip


def draw_method(rng: random.Random) -> Options:
    name = _mostly(rng, lambda: rng.choice(sorted(METHODS)), 0.05)
    own = sorted(METHODS[name].defaults) if isinstance(name, str) and name in METHODS else []
    chosen = rng.sample([*own, "lr", "ema"], min(rng.randint(0, 2), len(own) + 2))
    if rng.random() < 0.1:
        chosen.append("nonsense")
    defaults = {"lr": 0.1, "ema": 0.9, "nonsense": 1} | (dict(METHODS[name].defaults) if own else {})
    values = {k: _mostly(rng, lambda k=k: defaults[k], 0.5) for k in chosen}
    return {"name": name, "dataset_size": _mostly(rng, lambda: 8, 0.1), **values}


def try_method(options: Options) -> str:
    def run() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        given = dict(options)
        learner = dpivon.method(given.pop("name"), model, dataset_size=given.pop("dataset_size"), **given)
        engine = dpivon.PrivacyEngine()
        data = TensorDataset(torch.randn(8, 4), torch.randint(3, (8,)))
        private, optimizer, loader = learner.make_private(
            engine, DataLoader(data, batch_size=4), noise_multiplier=1.0, max_grad_norm=1.0
        )
        samples = getattr(learner.optimizer, "mc_samples", 1)
        for x, y in loader:
            optimizer.zero_grad()
            for _ in range(samples):
                with learner.sample():
                    nn.functional.cross_entropy(private(x), y).backward()
            optimizer.step()
        check_epsilon(engine.get_epsilon(1e-5), 1.0, 0.5, 2, 1e-5)
        return learner.predict(torch.randn(2, 4))

    return _ours(run)[0]


def draw_stack(rng: random.Random) -> Options:
    odds = rng.choice((0.0, 0.08))
    method = rng.choice(("dp-sgd", "dp-adam", "dp-ivon-gradsq", "dp-adambc", "nonsense"))
    names = rng.sample(HYPER, rng.randint(0, 1))
    return {
        "method": method,
        "seed": _mostly(rng, lambda: rng.randrange(2**40), odds),
        "noise_multiplier": _mostly(rng, lambda: rng.choice((0.0, 0.5, 2.0)), odds),
        "max_grad_norm": _mostly(rng, lambda: 1.0, odds),
        "lr": _mostly(rng, lambda: 0.1, odds),
        "batch_size": _mostly(rng, lambda: rng.choice((1, 4, 8, 9)), odds),
        "options": {name: _mostly(rng, lambda: 0.5, odds) for name in names},
        "dataset_size": _mostly(rng, lambda: None, odds),
        "block": _mostly(rng, lambda: 2, odds),
        "steps": _mostly(rng, lambda: 3, odds),
        "delta": _mostly(rng, lambda: 1e-3, odds),
    }


def try_stack(options: Options) -> str:
    given = dict(options)
    rest = {key: given.pop(key) for key in ("dataset_size", "block", "steps", "delta")}

    def run() -> Any:
        run = Run(**given)
        x, y = torch.randn(8, 4), torch.randint(3, (8,))
        size: Options = {"dataset_size": rest["dataset_size"], "block": rest["block"]}
        stack = Stack([run], AnyNetwork(MODELS["mlp"]), x, y, accountant="rdp", **size)
        for _ in stack.train(rest["steps"]):
            pass
        return stack, stack.epsilon(0, rest["delta"]), stack.posterior(0)

    outcome, made = _ours(run)
    if outcome == "ok":
        stack, found, _ = made
        spec = stack.mechanism.specs[0]
        check_epsilon(found, spec.noise_multiplier, spec.sample_rate, stack.steps_done, float(rest["delta"]))
    return outcome


def draw_predict(rng: random.Random) -> Options:
    odds = rng.choice((0.0, 0.2))
    return {
        "x": _mostly(rng, lambda: rng.choice(("tensor", "batches", "mapping")), odds),
        "samples": _mostly(rng, lambda: rng.choice((0, 1, 5)), odds),
        "batch_size": _mostly(rng, lambda: rng.choice((1, 3, 512)), odds),
        "likelihood": _mostly(rng, lambda: rng.choice(("categorical", "bernoulli", "gaussian")), odds),
        "noise_variance": _mostly(rng, lambda: rng.choice((None, 0.5)), odds),
        "posterior": rng.choice(("own", "wider", "point", "none")),
        "rows": rng.choice((0, 1, 5)),
    }


def try_predict(options: Options) -> str:
    torch.manual_seed(0)
    given = dict(options)
    model = nn.Linear(4, 3)
    x = torch.randn(given.pop("rows"), 4)
    inputs = {"tensor": x, "batches": [(x, None)], "mapping": {"input": x}}
    given["x"] = inputs.get(given["x"], given["x"]) if isinstance(given["x"], str) else given["x"]
    mean = {n: p.detach() for n, p in model.named_parameters()}
    posteriors = {
        "own": dpivon.Posterior(mean, {n: torch.ones_like(p) for n, p in mean.items()}),
        "wider": dpivon.Posterior({"weight": torch.ones(9, 9)}, {"weight": torch.ones(9, 9)}),
        "point": dpivon.Posterior.point(model),
        "none": None,
    }
    posterior = posteriors[given.pop("posterior")]
    return _ours(lambda: dpivon.predict(model, posterior, given.pop("x"), **given))[0]


CONFIGS: dict[str, tuple[Callable[[random.Random], Options], Callable[[Options], str]]] = {
    "budget": (draw_budget, try_budget),
    "tuning": (draw_tuning, try_tuning),
    "engine": (draw_engine, try_engine),
    "method": (draw_method, try_method),
    "stack": (draw_stack, try_stack),
    "predict": (draw_predict, try_predict),
}
