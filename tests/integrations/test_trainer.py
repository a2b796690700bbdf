"""``transformers.Trainer`` made private: the weights of the plain loop, one charge per logical batch, a resumed account."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import dpivon
from dpivon.errors import ArgumentError, BudgetSpent, pip_line

transformers = pytest.importorskip("transformers", reason=pip_line("huggingface"))
pytest.importorskip("peft", reason=pip_line("huggingface"))
from transformer_models import VOCABULARY, loss_of_each, make, make_batch  # noqa: E402

from dpivon.integrations.huggingface import PrivateTrainer, per_example_loss, token_uncertainty  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
N, SIGMA = 24, 1.0


def rows(count: int = N) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(3, VOCABULARY, (count, 6), generator=torch.Generator().manual_seed(7))
    return [{"input_ids": t, "labels": t} for t in tokens]


def arguments(folder, **options):
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 1, **options}
    return transformers.TrainingArguments(
        str(folder), max_grad_norm=0.1, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1,
        lr_scheduler_type="constant", **settings,
    )  # fmt: skip


def seeded() -> dpivon.PrivacyEngine:
    return dpivon.PrivacyEngine(generator=torch.Generator().manual_seed(3))


def made_optimizer(kind, model):
    trained = [p for p in model.parameters() if p.requires_grad]
    draws = torch.Generator().manual_seed(1)
    ivon = {"lr": 0.1, "ess": N, "generator": draws, "mc_samples": 2 if kind == "ivon2" else 1}
    return torch.optim.AdamW(trained, lr=0.1) if kind == "adamw" else dpivon.IVON(trained, **ivon)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("kind", ["ivon", "adamw"])
def test_it_trains_as_the_plain_loop_in_parts_and_charges_a_logical_batch_once(kind, tmp_path):
    def optimizer(model):
        return made_optimizer(kind, model)

    model, engine = make("gpt2", "causal LM", "LoRA"), seeded()
    trainer = PrivateTrainer(
        model, arguments(tmp_path), delta=1e-3, noise_multiplier=SIGMA, engine=engine, train_dataset=rows(),
        eval_dataset=rows(5), optimizers=(optimizer(model), None),
    )  # fmt: skip
    trainer.train()

    plain, account = make("gpt2", "causal LM", "LoRA"), seeded()
    private, dp, loader = account.make_private(
        module=plain, optimizer=optimizer(plain), data_loader=DataLoader(rows(), batch_size=8), noise_multiplier=SIGMA,
        max_grad_norm=0.1,
    )  # fmt: skip
    loss_fn = per_example_loss(plain)
    with dpivon.BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=dp) as batches:
        for batch in batches:
            dp.zero_grad()
            with dp.sampled_params(train=True) if kind == "ivon" else torch.enable_grad():
                loss_fn(private(input_ids=batch["input_ids"]), batch["labels"]).backward()
            dp.step()
    assert len(engine.accountant) == len(account.accountant) == 3
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    logged = trainer.state.log_history
    assert [row["epsilon"] for row in logged if "epsilon" in row][-1] == account.get_epsilon(1e-3)
    assert not any(name in row for row in logged for name in ("loss", "train_loss", "grad_norm"))
    assert "eval_loss" in trainer.evaluate()
    trainer.save_model(str(tmp_path / "saved"))
    saved = tmp_path / "saved" / "posterior.safetensors"
    assert saved.exists() == (kind == "ivon")
    if kind == "ivon":
        held = dpivon.Posterior.load(saved)
        assert held.num_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
        entropy, information = token_uncertainty(model, held, {"input_ids": rows(2)[0]["input_ids"][None]}, samples=3)
        assert information.shape == (1, 6)
        assert bool(((information >= 0) & (information <= entropy)).all())


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize(("kind", "masked"), [("ivon2", True), ("adamw", False)])
def test_the_captured_step_learns_what_the_eager_one_does(kind, masked, tmp_path):
    """Recorded on a CPU; batches larger than a part run in several, and are one release."""

    texts = rows()
    for i, text in enumerate(texts if masked else ()):  # padded to one length, as a tokenizer does
        used = torch.arange(6) < 3 + i % 4
        text |= {"attention_mask": used.long(), "labels": text["labels"].where(used, -100)}

    def trained(capture):
        model, engine = make("gpt2", "causal LM", "LoRA"), seeded()
        settings = arguments(tmp_path, num_train_epochs=3, gradient_accumulation_steps=1, per_device_train_batch_size=6)
        settings.lr_scheduler_type = "linear"
        trainer = PrivateTrainer(
            model, settings, delta=1e-3, noise_multiplier=SIGMA, engine=engine, train_dataset=texts, capture=capture,
            optimizers=(made_optimizer(kind, model), None),
        )  # fmt: skip
        sizes, note = [], trainer.training_step
        trainer.training_step = lambda model, inputs, n: (sizes.append(len(inputs["labels"])), note(model, inputs))[1]
        trainer.train()
        assert max(sizes) > 6 >= min(sizes)
        assert len(engine.accountant) == trainer.state.global_step == 12
        return trainer, torch.cat([p.detach().flatten() for p in model.parameters()])

    eager, expected = trained(None)
    captured, found = trained(True)
    assert (eager.path, captured.path) == ("eager (on cpu)", "captured")
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    assert captured.epsilon == eager.epsilon
    with pytest.raises(dpivon.PrivacyError, match="without a batch"):
        captured._dp.step()
    assert len(captured.engine.accountant) == 12


def test_a_loss_of_ones_own_is_one_per_example(tmp_path):
    class Scaled(PrivateTrainer):
        def losses(self, model, inputs):
            called.append(len(inputs["labels"]))
            return 0.5 * super().losses(model, inputs)

    class Whole(PrivateTrainer):
        def compute_loss(self, model, inputs, **options):
            return model(**inputs).loss

    called = []
    given = {"delta": 1e-3, "noise_multiplier": SIGMA, "train_dataset": rows()}
    trainer = Scaled(make("gpt2", "causal LM", "LoRA"), arguments(tmp_path), engine=seeded(), **given)
    trainer.train()
    assert called
    assert len(trainer.engine.accountant) == 3
    with pytest.raises(ArgumentError, match=r"compute_loss='Whole.compute_loss'.*Override losses"):
        Whole(make("gpt2", "causal LM"), arguments(tmp_path), **given)


@pytest.mark.slow
def test_a_run_that_is_resumed_goes_on_with_its_ledger_and_stops_at_its_budget(tmp_path):
    def trainer(**options):
        settings = arguments(tmp_path, num_train_epochs=2, save_strategy="steps", save_steps=2)
        return PrivateTrainer(
            make("gpt2", "causal LM", "LoRA"), settings, delta=1e-3, target_epsilon=4.0, train_dataset=rows(), **options
        )

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 3
            return control

    first = trainer(callbacks=[Stop()])
    first.train()
    assert len(first.engine.accountant) == 3
    first.engine.ledger.close()
    second = trainer()
    assert len(second.engine.accountant) == 3
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(second.engine.accountant) == 6  # of which one was lost: as many as were planned
    assert second.state.global_step == 5
    assert second.epsilon <= 4.0
    entries = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert len(entries) >= 6
    second.engine.ledger.close()
    third = trainer()
    with pytest.raises(BudgetSpent):
        third.train()
    third.engine.ledger.close()
    (tmp_path / "ledger.jsonl").unlink()
    for engine, message in ((None, "not the ledger"), (dpivon.PrivacyEngine(), "the engine has no ledger")):
        without = trainer(engine=engine)
        with pytest.raises(dpivon.DpivonError, match=message):
            without.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert len(without.engine.accountant) == 0


def test_a_checkpoint_that_a_run_without_a_ledger_overwrote_is_not_resumed_with_the_earlier_ledger(tmp_path):
    def trainer(**options):
        settings = arguments(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
        model = make("gpt2", "causal LM", "LoRA")
        return PrivateTrainer(model, settings, delta=1e-3, noise_multiplier=SIGMA, train_dataset=rows(), **options)

    first = trainer()
    first.train()
    first.engine.ledger.close()
    assert (tmp_path / "checkpoint-1" / "account.json").exists()
    trainer(engine=dpivon.PrivacyEngine()).train()
    third = trainer()
    with pytest.raises(dpivon.DpivonError, match="no account"):
        third.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    third.engine.ledger.close()


@pytest.mark.parametrize("swapped", ["adapter_model.safetensors", "optimizer.pt", "model.safetensors"])
def test_a_checkpoint_with_a_file_of_another_is_not_resumed_with_its_account(swapped, tmp_path):
    """The last is in neither: it would be read in place of the adapters."""

    def trainer(name, sigma=SIGMA):
        settings = arguments(tmp_path / name, max_steps=2, save_strategy="steps", save_steps=1)
        model = make("gpt2", "causal LM", "LoRA")
        return PrivateTrainer(model, settings, delta=1e-3, noise_multiplier=sigma, train_dataset=rows())

    for name, sigma in (("paid", SIGMA), ("other", SIGMA / 9)):
        first = trainer(name, sigma)
        first.train()
        first.engine.ledger.close()
    checkpoint, other = (tmp_path / name / "checkpoint-1" for name in ("paid", "other"))
    file = checkpoint / swapped
    saved = file.read_bytes() if file.exists() else None
    file.write_bytes((other / (swapped if saved else "adapter_model.safetensors")).read_bytes())
    second = trainer("paid")
    with pytest.raises(dpivon.DpivonError, match=f"resume_from_checkpoint=.*its {swapped} is not the one .* Put back"):
        second.train(resume_from_checkpoint=str(checkpoint))
    assert len(second.engine.accountant) == 2  # what was charged before; nothing was released
    second.engine.ledger.close()
    file.unlink() if saved is None else file.write_bytes(saved)
    third = trainer("paid")
    third.train(resume_from_checkpoint=str(checkpoint))
    assert len(third.engine.accountant) == 3
    third.engine.ledger.close()


@pytest.mark.parametrize(
    ("option", "value"),
    [("label_smoothing_factor", 0.1), ("torch_compile", True), ("max_grad_norm", 0.0), ("auto_find_batch_size", True)],
)
def test_what_would_reach_raw_gradients_is_refused(option, value, tmp_path):
    settings = arguments(tmp_path)
    setattr(settings, option, value)
    with pytest.raises(ArgumentError, match=option):
        PrivateTrainer(make("gpt2", "causal LM"), settings, delta=1e-3, noise_multiplier=1.0, train_dataset=rows())


@pytest.mark.parametrize("task", ["causal LM", "token classification", "sequence classification"])
def test_the_loss_is_that_of_each_example_alone(task):
    model = make("gpt2", task)
    inputs, labels = make_batch("gpt2", task, 5)
    outputs = model(**inputs)
    expected = loss_of_each(outputs.logits, labels, task)
    torch.testing.assert_close(per_example_loss(model)(outputs, labels), expected.mean())
    alone = [model(**{k: v[i : i + 1] for k, v in inputs.items()}, labels=labels[i : i + 1]).loss for i in (2, 3, 4)]
    torch.testing.assert_close(expected[2:], torch.stack(alone))


def test_regression_and_several_labels_have_a_loss_per_example():
    model = make("bert", "sequence classification")
    z, targets = torch.randn(4, 3), torch.rand(4, 3).round()
    several = F.binary_cross_entropy_with_logits(z, targets)
    torch.testing.assert_close(per_example_loss(model)(z, targets), several)
    z, targets = torch.randn(4, 1), torch.randn(4)
    torch.testing.assert_close(per_example_loss(model)(z, targets), F.mse_loss(z[:, 0], targets))


@pytest.mark.parametrize("when", ["before", "after"])
def test_accelerate_may_prepare_the_optimizer_before_or_after_and_its_loader_is_refused(when):
    def run(prepares: str, loader_too: bool = False) -> list[torch.Tensor]:
        torch.manual_seed(0)
        parts = [torch.nn.Linear(4, 3)]
        parts += [dpivon.IVON(parts[0].parameters(), lr=0.1, ess=40, generator=torch.Generator().manual_seed(2))]
        parts += [DataLoader([(torch.randn(4), i % 3) for i in range(40)], batch_size=10)]
        accelerator = accelerate.Accelerator(cpu=True)
        if prepares == "before":
            parts[:2] = accelerator.prepare(*parts[:2])
        engine = seeded()
        parts = list(
            engine.make_private(
                module=parts[0], optimizer=parts[1], data_loader=parts[2], noise_multiplier=1.0, max_grad_norm=1.0
            )
        )
        private = parts[1]
        if prepares == "after":
            parts[:2] = accelerator.prepare(*parts[:2])
        model, optimizer, loader = *parts[:2], accelerator.prepare(parts[2]) if loader_too else parts[2]
        for x, y in loader:
            optimizer.zero_grad()
            with private.sampled_params(train=True):
                accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        assert len(engine.accountant) == 4
        return [p.detach() for p in model.parameters()]

    accelerate = pytest.importorskip("accelerate", reason=pip_line("huggingface"))
    assert all(map(torch.equal, run(when), run("never")))
    with pytest.raises(dpivon.PrivacyError, match="accelerate prepare the model and the optimizer only"):
        run(when, loader_too=True)
