"""A real Trainer on digits: the callback's run is the plain loop's run, and what would weaken it is refused."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpivon
from dpivon.errors import pip_line

lightning = pytest.importorskip("lightning.pytorch", reason=pip_line("lightning"))
from dpivon.integrations.lightning import PrivateTraining  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
]
N, B, EPOCHS = 600, 100, 2


@pytest.fixture(scope="module")
def digits():
    return some_digits()


def some_digits() -> TensorDataset:
    raw = load_digits()
    x = torch.tensor(raw.data[:N], dtype=torch.float32) / 16
    return TensorDataset(x, torch.tensor(raw.target[:N]))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


class Digits(lightning.LightningModule):
    def __init__(self, optimizer: str = "ivon", logs: bool = False, inside: bool = False) -> None:
        super().__init__()
        self.net, self.kind, self.logs, self.inside = network(), optimizer, logs, inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x) if self.inside else self(x), y)
        if self.logs:
            self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_accuracy", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.kind, self.net)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def make_optimizer(kind: str, net: nn.Module) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(net.parameters(), lr=0.01)
    draws = torch.Generator().manual_seed(1)
    return dpivon.IVON(net.parameters(), lr=0.5, ess=N, mc_samples=2 if kind == "ivon2" else 1, generator=draws)


def loader(data: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=B, generator=torch.Generator().manual_seed(2))


def trainer(callback: Any, **options: Any) -> Any:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(**{"max_epochs": EPOCHS, "accelerator": "cpu", **quiet, **options}, callbacks=[callback])


def callback(**options: Any) -> PrivateTraining:
    plan = {} if "noise_multiplier" in options else {"target_epsilon": 8.0}
    noise = torch.Generator().manual_seed(3)
    return PrivateTraining(**{"delta": 1e-4, "max_grad_norm": 1.0, "noise_generator": noise, **plan, **options})


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", ["ivon", "ivon2", "adam"])
def test_the_run_is_the_plain_loops_run(digits, kind):
    module, private = Digits(kind), callback()
    trainer(private).fit(module, loader(digits), DataLoader(digits, batch_size=300))

    net = network()
    optimizer = make_optimizer(kind, net)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine = dpivon.PrivacyEngine()
    model, optimizer, batches = engine.make_private_with_epsilon(
        module=net, optimizer=optimizer, data_loader=loader(digits), target_epsilon=8.0, target_delta=1e-4, epochs=EPOCHS,
        max_grad_norm=1.0, noise_generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    for _ in range(EPOCHS):
        for x, y in batches:
            optimizer.zero_grad()

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        schedule.step()

    assert len(private.engine.accountant) == len(engine.accountant) == EPOCHS * N // B
    assert private.epsilon == engine.get_epsilon(1e-4) <= 8.0
    assert private.optimizer.noise_multiplier == optimizer.noise_multiplier
    ours, theirs = private.posterior(), optimizer.posterior()
    for name, mean in theirs.mean.items():
        assert not torch.equal(mean, network().get_parameter(name))
        assert torch.equal(ours.mean[f"net.{name}"], mean), name
        assert torch.equal(ours.variance[f"net.{name}"], theirs.variance[name]), name


def test_people_are_drawn_where_their_ids_are_given(digits):
    private = callback(noise_multiplier=1.0, user_ids=[i % 200 for i in range(N)], rows_per_user=2)
    trainer(private).fit(Digits(), loader(digits))
    assert (private.engine.accountant.unit, private.engine.accountant.history) == (
        "person",
        [(1.0, B / 200, 2 * EPOCHS)],
    )
    assert private.optimizer.draws.sampler().people.rows == 2


def test_a_named_network_may_be_called_by_itself(digits):
    module, private = Digits(inside=True), callback(network="net")
    fitted = trainer(private)
    fitted.fit(module, loader(digits))
    assert set(private.posterior().mean) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert float(fitted.callback_metrics["epsilon"]) == pytest.approx(private.epsilon)
    with pytest.raises(dpivon.PrivacyError, match="outside the forward of its model"):
        trainer(callback()).fit(Digits(inside=True), loader(digits))


def test_no_step_passes_the_budget(digits):
    private = callback(epochs=1)
    with pytest.raises(dpivon.PrivacyError, match="target_epsilon"):
        trainer(private).fit(Digits(), loader(digits))
    assert private.epsilon <= 8.0
    assert len(private.engine.accountant) == N // B


def test_a_loader_that_is_not_replaced_is_refused_at_the_first_step(digits, monkeypatch):
    """The seeded bug: Lightning goes on with the caller's own loader, whose batches are no Poisson samples."""
    private = callback()
    fit_start = private.on_fit_start

    def forgets(trainer: Any, module: Any) -> None:
        before = trainer.fit_loop._data_source.instance
        fit_start(trainer, module)
        trainer.fit_loop._data_source.instance = before

    monkeypatch.setattr(private, "on_fit_start", forgets)
    with pytest.raises(dpivon.PrivacyError, match="Poisson batch"):
        trainer(private).fit(Digits(), loader(digits))
    assert len(private.engine.accountant) == 0


def test_what_the_training_step_logs_is_warned_of(digits):
    with pytest.warns(dpivon.PrivacyWarning, match="logged 'train_loss'") as caught:
        trainer(callback()).fit(Digits(logs=True), loader(digits), DataLoader(digits, batch_size=300))
    ours = [str(w.message) for w in caught if issubclass(w.category, dpivon.PrivacyWarning)]
    assert len(ours) == 1  # once, and not of val_accuracy
    with warnings.catch_warnings():
        warnings.simplefilter("error", dpivon.PrivacyWarning)
        trainer(callback()).fit(Digits(), loader(digits), DataLoader(digits, batch_size=300))


class Manual(Digits):
    automatic_optimization = False


class Two(Digits):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[0].parameters(), lr=0.1), torch.optim.SGD(self.net[2].parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2.*summed before clipping"),
        ({"gradient_clip_val": 1.0}, r"gradient_clip_val=1\.0"),
        ({"precision": "bf16-true"}, "precision='bf16-true'"),
        ({"overfit_batches": 2}, "overfit_batches=2"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs=1"),
        ({"max_epochs": -1, "max_steps": 3}, "epochs=None.*max_epochs"),
    ],
)
def test_trainers_that_would_weaken_it_are_refused(digits, options, message):
    private = callback()
    with pytest.raises(dpivon.ArgumentError, match=message):
        trainer(private, **options).fit(Digits(), loader(digits))
    assert len(private.engine.accountant) == 0


def test_several_processes_are_refused():
    ddp = SimpleNamespace(
        strategy=lightning.strategies.DDPStrategy(), world_size=1
    )  # not started: no process group here
    with pytest.raises(dpivon.ArgumentError, match=r"strategy='DDPStrategy.*devices=1"):
        callback()._check(ddp, Digits())


def test_manual_optimization_is_refused(digits):
    with pytest.raises(dpivon.ArgumentError, match=r"automatic_optimization=False.*raw gradients"):
        trainer(callback()).fit(Manual(), loader(digits))


def test_several_optimizers_are_refused_by_lightning_itself(digits):
    with pytest.raises(RuntimeError, match="multiple optimizers"):
        trainer(callback()).fit(Two(), loader(digits))


def losses(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def weights(posterior: Any) -> torch.Tensor:
    return torch.cat([t.flatten() for part in (posterior.mean, posterior.variance) for t in part.values()])


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", ["ivon", "ivon2", "adam"])
def test_with_a_loss_per_example_the_step_is_compiled_and_learns_the_same(digits, kind):
    """Recorded on a CPU, padded, and replayed; with the scheduler, θ-samples and charges of the eager callback."""

    def run(**options: Any) -> tuple[PrivateTraining, Any]:
        private = callback(**options)
        fitted = trainer(private, max_epochs=3)
        module = Digits(kind)
        fitted.fit(module, loader(digits), DataLoader(digits, batch_size=300))
        assert fitted.global_step == 3 * N // B
        assert fitted.optimizers[0].param_groups[0]["lr"] == pytest.approx((0.5 if kind != "adam" else 0.01) / 8)
        return private, fitted

    eager, _ = run()
    assert eager.path == "eager (no loss_fn: training_step returns one loss for the batch)"
    expected = weights(eager.posterior())
    for capture, path in ((None, "eager (on cpu)"), (True, "captured")):
        private, fitted = run(loss_fn=losses, capture=capture)
        assert private.path == path
        assert private.epsilon == eager.epsilon == pytest.approx(float(fitted.callback_metrics["epsilon"]))
        torch.testing.assert_close(weights(private.posterior()), expected, rtol=1e-4, atol=1e-6)
    (program,) = private._step._programs.values()
    assert program.whole.prepared  # noise and update were in the program too


def test_bf16_is_of_the_loss_alone(digits):
    inside, charged = [], []

    def in_bf16(model: nn.Module, batch: Any) -> torch.Tensor:
        inside.append(torch.is_autocast_enabled("cpu"))
        return losses(model, batch)

    private = callback(loss_fn=in_bf16, network="net")
    charge = private.engine.accountant.step
    private.engine.accountant.step = lambda **terms: (
        charged.append(torch.is_autocast_enabled("cpu")),
        charge(**terms),
    )
    trainer(private, precision="bf16-mixed", max_epochs=1).fit(Digits(), loader(digits))
    assert inside[-N // B :] == [True] * (N // B)  # those before tried it in double precision
    assert charged == [False] * (N // B)


def test_a_loss_that_is_not_one_per_example_is_refused_before_any_release(digits):
    private = callback(loss_fn=lambda model, batch: losses(model, batch).mean())
    with pytest.raises(dpivon.DpivonError, match="loss_fn"):
        trainer(private).fit(Digits(), loader(digits))
    assert len(private.engine.accountant) == 0
    with pytest.raises(dpivon.ArgumentError, match=r"capture=True.*loss_fn"):
        callback(capture=True)


def test_one_callback_one_fit(digits):
    private, module = callback(noise_multiplier=1.0), Digits()
    trainer(private).fit(module, loader(digits))
    with pytest.raises(dpivon.PrivacyError, match="second fit"):
        trainer(private).fit(Digits(), loader(digits))
    with pytest.raises(dpivon.ArgumentError, match="already private"):
        trainer(callback()).fit(module, loader(digits))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_multiplier": 1.0, "target_epsilon": 1.0}, r"target_epsilon=1\.0.*exactly one"),
        ({"poisson_sampling": False}, "poisson_sampling=False"),
        ({"grad_sample_mode": "ghost"}, "grad_sample_mode='ghost'"),
        ({"delta": 2.0}, r"delta=2\.0"),
    ],
)
def test_arguments_that_contradict_are_refused(options, message):
    with pytest.raises(dpivon.ArgumentError, match=message):
        callback(**options)


def test_an_unknown_network_and_no_result_yet(digits):
    private = callback(network="body")
    with pytest.raises(dpivon.DpivonError, match="before fit"):
        private.posterior()
    with pytest.raises(dpivon.ArgumentError, match=r"network='body'.*'net'"):
        trainer(private).fit(Digits(), loader(digits))
