"""Bad arguments: one clear sentence that names argument and value, and a corrected call right after succeeds."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import ivon as upstream
import pytest
import torch
from private_runs import CLASSES, EXAMPLES, FEATURES, data, make, mlp
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import dpivon
from dpivon import (
    ArgumentError,
    BatchMemoryManager,
    DpivonError,
    NoiseSpec,
    PrivacyEngine,
    PrivacyError,
    PrivacyWarning,
)

NAN, INF = math.nan, math.inf


def plain_loader(**options: Any) -> DataLoader:
    return DataLoader(TensorDataset(*data()), **{"batch_size": 4, **options})


def state(module: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Everything about model and optimizer that a refused call could have changed."""
    hooks = [
        (name, len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), "forward" in m.__dict__)
        for name, m in module.named_modules()
    ]
    steps = len(getattr(optimizer, "_optimizer_step_pre_hooks", ()))
    attributes = hasattr(module, "autograd_grad_sample_hooks"), getattr(optimizer, "_private", None)
    return hooks, steps, attributes, copy.deepcopy(optimizer.state_dict())


def refused(call: Callable[[], Any], argument: str, value: str) -> None:
    with pytest.raises(DpivonError) as caught:
        call()
    message = str(caught.value)
    assert argument in message
    assert value in message
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 400


GOOD = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
CALLS: dict[str, tuple[dict[str, Any], str, str]] = {
    "σ negative": ({"noise_multiplier": -1.0}, "noise_multiplier", "-1.0"),
    "σ NaN": ({"noise_multiplier": NAN}, "noise_multiplier", "nan"),
    "σ infinite": ({"noise_multiplier": INF}, "noise_multiplier", "inf"),
    "σ no number": ({"noise_multiplier": "loud"}, "noise_multiplier", "'loud'"),
    "σ missing": ({"noise_multiplier": None}, "noise_multiplier", "None"),
    "C zero": ({"max_grad_norm": 0.0}, "max_grad_norm", "0.0"),
    "C negative": ({"max_grad_norm": -2.0}, "max_grad_norm", "-2.0"),
    "C infinite": ({"max_grad_norm": INF}, "max_grad_norm", "inf"),
    "C NaN": ({"max_grad_norm": NAN}, "max_grad_norm", "nan"),
    "C a list for flat": ({"max_grad_norm": [1.0] * 4}, "max_grad_norm", "[1.0"),
    "C a number per layer": ({"clipping": "per_layer"}, "max_grad_norm", "1.0"),
    "C too few per layer": ({"clipping": "per_layer", "max_grad_norm": [1.0, 1.0]}, "max_grad_norm", "[1.0, 1.0]"),
    "C bad in a list": ({"clipping": "per_layer", "max_grad_norm": [1.0, 1.0, 0.0, 1.0]}, "max_grad_norm", "0.0"),
    "clipping unknown": ({"clipping": "tight"}, "clipping", "'tight'"),
    "clipping adaptive": ({"clipping": "adaptive"}, "clipping", "'adaptive'"),
    "reduction unknown": ({"loss_reduction": "none"}, "loss_reduction", "'none'"),
    "mode unknown": ({"grad_sample_mode": "magic"}, "grad_sample_mode", "'magic'"),
    "random on empty": ({"rand_on_empty": True}, "rand_on_empty", "True"),
    "batch above N": ({"expected_batch_size": 13}, "expected_batch_size", "13"),
    "batch zero": ({"expected_batch_size": 0}, "expected_batch_size", "0"),
    "batch negative": ({"expected_batch_size": -4}, "expected_batch_size", "-4"),
    "batch NaN": ({"expected_batch_size": NAN}, "expected_batch_size", "nan"),
    "N zero": ({"dataset_size": 0}, "dataset_size", "0"),
    "N fractional": ({"dataset_size": 12.5}, "dataset_size", "12.5"),
    "augmentations zero": ({"augmentations": 0}, "augmentations", "0"),
    "augmentations fractional": ({"augmentations": 1.5}, "augmentations", "1.5"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_bad_argument_of_make_private_is_named_and_changes_nothing(name):
    options, argument, value = CALLS[name]
    module = mlp()
    optimizer = dpivon.IVON(module.parameters(), lr=0.1, ess=100.0)
    engine, loader = PrivacyEngine(), plain_loader()
    before = state(module, optimizer)
    refused(
        lambda: engine.make_private(module=module, optimizer=optimizer, data_loader=loader, **(GOOD | options)),
        argument,
        value,
    )
    assert state(module, optimizer) == before
    corrected = make(
        module=module, optimizer=lambda _: optimizer, engine=engine
    )  # another data set: no warning of a second one
    corrected.release(*data())
    assert len(engine.accountant) == 1


BUDGET = {"target_epsilon": 3.0, "target_delta": 1e-5, "epochs": 1, "max_grad_norm": 1.0}
BUDGETS: dict[str, tuple[dict[str, Any], str, str]] = {
    "ε and σ": ({"noise_multiplier": 1.0}, "noise_multiplier", "1.0"),
    "ε zero": ({"target_epsilon": 0.0}, "target_epsilon", "0.0"),
    "ε negative": ({"target_epsilon": -3.0}, "target_epsilon", "-3.0"),
    "ε NaN": ({"target_epsilon": NAN}, "target_epsilon", "nan"),
    "ε infinite": ({"target_epsilon": INF}, "target_epsilon", "inf"),
    "δ zero": ({"target_delta": 0.0}, "target_delta", "0.0"),
    "δ one": ({"target_delta": 1.0}, "target_delta", "1.0"),
    "δ NaN": ({"target_delta": NAN}, "target_delta", "nan"),
    "epochs zero": ({"epochs": 0}, "epochs", "0"),
    "epochs fractional": ({"epochs": 1.5}, "epochs", "1.5"),
    "C zero": ({"max_grad_norm": 0.0}, "max_grad_norm", "0.0"),
    "batch above N": ({"expected_batch_size": 13}, "expected_batch_size", "13"),
    "mode unknown": ({"grad_sample_mode": "magic"}, "grad_sample_mode", "'magic'"),
}


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize("name", BUDGETS)
def test_a_bad_argument_of_make_private_with_epsilon_is_named_and_changes_nothing(name):
    options, argument, value = BUDGETS[name]
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine, loader = PrivacyEngine(), plain_loader()
    before = state(module, optimizer)
    call = engine.make_private_with_epsilon
    refused(lambda: call(module=module, optimizer=optimizer, data_loader=loader, **(BUDGET | options)), argument, value)
    assert state(module, optimizer) == before
    assert engine._limit is None


def test_a_budget_does_not_start_on_an_account_that_was_used():
    run = make()
    run.release(*data())
    with pytest.raises(PrivacyError, match="already charged 1 releases"):
        make(engine=run.engine, call=run.engine.make_private_with_epsilon, noise_multiplier=None, **BUDGET)


# ---- models


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(FEATURES)


def on_two_devices() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Linear(7, CLASSES, device="meta"))


def frozen() -> nn.Module:
    return mlp().requires_grad_(False)


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.BatchNorm1d(7), nn.Linear(7, CLASSES))


def with_max_norm() -> nn.Module:
    return nn.Sequential(nn.Embedding(FEATURES, 3, max_norm=1.0), nn.Flatten(), nn.Linear(3, CLASSES))


@pytest.mark.parametrize(
    ("network", "argument", "value"),
    [
        (with_batch_norm, "module", "BatchNorm1d"),
        (frozen, "module", "no trainable parameters"),
        (on_two_devices, "module", "meta"),
        (lambda: mlp().half(), "module.0.weight", "float16"),
        (lambda: mlp().eval(), "module", "training mode"),
        (lambda: nn.DataParallel(mlp()), "module", "DataParallel"),
        (lambda: nn.LSTM(FEATURES, CLASSES), "module", "LSTM"),
        (with_max_norm, "module", "max_norm"),
    ],
)
def test_a_model_that_cannot_be_trained_privately_is_refused(network, argument, value):
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = state(module, optimizer)
    loader = plain_loader()
    call = PrivacyEngine().make_private
    refused(
        lambda: call(module=module, optimizer=optimizer, data_loader=loader, **GOOD),
        argument,
        value,
    )
    assert state(module, optimizer) == before


@pytest.mark.parametrize("wrap_model", [True, False])
def test_wrapping_twice_is_refused(mode, wrap_model):
    module = mlp()
    run = make(mode, module=module, wrap_model=wrap_model)
    model = run.model if wrap_model else module
    fresh = torch.optim.SGD(module.parameters(), lr=0.1)
    refused(lambda: make(mode, module=model, optimizer=lambda _: fresh), "module", "already private")
    refused(lambda: make(mode, module=mlp(), optimizer=lambda _: run.optimizer), "optimizer", "DPOptimizer")
    run.criterion(model(data()[0]), data()[1])


def test_the_optimizer_must_have_the_models_parameters_and_all_of_them():
    module = mlp()
    others = torch.optim.SGD([*module.parameters(), nn.Parameter(torch.zeros(2, 3))], lr=0.1)
    refused(lambda: make(module=module, optimizer=lambda _: others), "optimizer", "(2, 3)")
    some = torch.optim.SGD(module[0].parameters(), lr=0.1)
    refused(lambda: make(module=module, optimizer=lambda _: some), "optimizer", "'2.weight'")
    module[2].requires_grad_(False)
    make(module=module, optimizer=lambda _: some).release(*data())


def test_upstream_ivon_is_refused():
    module = mlp()
    optimizer = upstream.IVON(module.parameters(), lr=0.1, ess=100.0)
    refused(lambda: make(module=module, optimizer=lambda _: optimizer), "optimizer", "dpivon.IVON")


def test_a_noise_generator_contradicts_secure_mode():
    generator = torch.Generator()
    refused(lambda: make(secure_mode=True, noise_generator=generator), "noise_generator", "secure_mode=True")


# ---- data


class Silent:
    """A batch sampler that does not say how large its batches are."""

    def __iter__(self) -> Iterator[list[int]]:
        yield [0, 1]

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("loader", "argument", "value"),
    [
        (lambda: DataLoader(Stream(), batch_size=4), "data_loader", "Stream"),
        (lambda: DataLoader(TensorDataset(torch.zeros(0, FEATURES)), batch_size=4), "data_loader", "empty"),
        (lambda: plain_loader(batch_size=EXAMPLES + 1), "expected_batch_size", "13"),
        (lambda: plain_loader(sampler=WeightedRandomSampler([1.0] * 12, 12)), "data_loader", "WeightedRandomSampler"),
        (lambda: plain_loader(sampler=SubsetRandomSampler([1, 2, 3])), "data_loader", "SubsetRandomSampler"),
        (
            lambda: plain_loader(sampler=RandomSampler(range(12), replacement=True, num_samples=12)),
            "data_loader",
            "RandomSampler",
        ),
        (lambda: DataLoader(TensorDataset(*data()), batch_sampler=Silent()), "expected_batch_size", "Silent"),
    ],
)
def test_data_that_cannot_be_sampled_independently_are_refused(loader, argument, value):
    module = mlp()
    optimizer = dpivon.IVON(module.parameters(), lr=0.1, ess=100.0)
    before = state(module, optimizer)
    engine, unusable = PrivacyEngine(), loader()
    refused(
        lambda: engine.make_private(module=module, optimizer=optimizer, data_loader=unusable, **GOOD), argument, value
    )
    assert state(module, optimizer) == before
    make(module=module, optimizer=lambda _: optimizer, engine=engine).release(*data())


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("options", [{"sampler": WeightedRandomSampler([1.0] * 12, 12)}, {"drop_last": True}])
def test_another_sampler_runs_only_as_recorded_non_private(options):
    module = mlp()
    engine = PrivacyEngine()
    with pytest.warns(PrivacyWarning, match="poisson_sampling=False"):
        model, optimizer, loader = engine.make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=plain_loader(**options),
            poisson_sampling=False,
            **GOOD,
        )
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    with pytest.warns(PrivacyWarning, match="infinite"):
        assert engine.get_epsilon(1e-5) == math.inf


def test_a_second_data_set_under_one_engine_is_warned_of():
    engine = PrivacyEngine()
    make(engine=engine)
    with pytest.warns(PrivacyWarning, match="second dataset"):
        make(engine=engine)


# ---- the account, the spec, the memory manager


@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0, NAN, INF, "small"])
def test_a_bad_delta_is_refused(delta):
    engine = PrivacyEngine()
    refused(lambda: engine.get_epsilon(delta), "delta", repr(delta))


def test_a_delta_that_allows_publishing_an_example_is_warned_of():
    run = make()
    run.release(*data())
    with pytest.warns(PrivacyWarning, match="delta=0.1"):
        run.engine.get_epsilon(0.1)


@pytest.mark.parametrize("name", ["gdp", "moments", None, 3])
def test_an_unknown_accountant_is_refused(name):
    refused(lambda: PrivacyEngine(accountant=name), "accountant", repr(name))


SPEC = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 4.0, "sample_rate": 0.1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise_multiplier", -0.1),
        ("noise_multiplier", NAN),
        ("max_grad_norm", 0.0),
        ("expected_batch_size", 0.0),
        ("expected_batch_size", INF),
        ("sample_rate", 0.0),
        ("sample_rate", 1.1),
        ("sample_rate", NAN),
        ("loss_reduction", "max"),
        ("accumulated", 0),
        ("accumulated", 1.5),
        ("accumulated", 2),
    ],
)
def test_a_release_cannot_be_described_wrongly(name, value):
    refused(lambda: NoiseSpec(**(SPEC | {name: value})), name, repr(value))


@pytest.mark.parametrize(
    ("name", "value"), [("noise_multiplier", -1.0), ("noise_multiplier", NAN), ("max_grad_norm", 0.0)]
)
def test_a_scheduler_that_sets_nonsense_is_refused_and_the_old_value_stays(name, value):
    run = make()
    before = run.optimizer.spec
    refused(lambda: setattr(run.optimizer, name, value), name, repr(value))
    assert run.optimizer.spec == before
    assert run.optimizer.clipping.sensitivity == before.max_grad_norm


@pytest.mark.parametrize("size", [0, -1, 2.5, "large"])
def test_a_memory_manager_needs_a_whole_number_of_examples(size):
    run = make()
    refused(
        lambda: BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=size, optimizer=run.optimizer),
        "max_physical_batch_size",
        repr(size),
    )


def test_step_without_a_gradient_is_refused(mode):
    run = make(mode)
    next(iter(run.loader))
    with pytest.raises(PrivacyError, match="backward"):
        run.optimizer.step()
    assert run.contributions == []
    assert len(run.engine.accountant) == 0


def test_adding_parameters_to_a_private_optimizer_is_refused():
    run = make()
    with pytest.raises(PrivacyError, match="add_param_group"):
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_an_ordinary_optimizer_has_no_posterior_to_sample_from():
    run = make(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    with pytest.raises(ArgumentError, match="optimizer=SGD"), run.optimizer.sampled_params(train=True):
        pass
