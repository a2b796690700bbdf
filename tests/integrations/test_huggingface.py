"""Models of transformers through the engine: clipped sums are those of a loop over examples, for stock models as they are."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import dpivon
from dpivon.errors import PrivacyError, pip_line
from dpivon.privacy.gradients.bookkeeping import BookKeeper

transformers = pytest.importorskip("transformers", reason=pip_line("huggingface"))
pytest.importorskip("peft", reason=pip_line("huggingface"))
from transformer_models import MODELS, TUNINGS, check_neighbours, loss_of_each, make, make_batch  # noqa: E402

from dpivon.integrations.huggingface import per_example_loss  # noqa: E402

C, ROWS = 0.05, 5
#: With DoRA, whose layers run example by example, and positions flattened into rows.
REFUSED = {("opt", "DoRA")}
CASES = [(name, task, tuning) for tuning in TUNINGS for name, task in MODELS if (name, tuning) not in REFUSED]


def clipped_by_a_loop(model: nn.Module, inputs, labels, task: str) -> list[torch.Tensor]:
    """Σ_i g_i min(1, C/(‖g_i‖ + 1e-6)), each example run by itself."""
    params = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in params]
    for i in range(ROWS):
        some = {key: value[i : i + 1] for key, value in inputs.items()}
        loss = loss_of_each(model(**some).logits, labels[i : i + 1], task).sum()
        found = torch.autograd.grad(loss, params, allow_unused=True)
        g = [torch.zeros_like(p) if t is None else t for p, t in zip(params, found, strict=True)]
        norm = float(torch.cat([t.flatten() for t in g]).norm())
        total = [s + t * min(1.0, C / (norm + 1e-6)) for s, t in zip(total, g, strict=True)]
    return total


def released(model: nn.Module, inputs, labels, parts: int = 1) -> tuple[list[torch.Tensor], set[str]]:
    """What one step without noise releases, times the batch, in the ordinary loop; and what ran example by example."""
    params = [p for p in model.parameters() if p.requires_grad]
    rows = [({key: value[i] for key, value in inputs.items()}, labels[i]) for i in range(ROWS)]
    private, optimizer, loader = dpivon.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(params, lr=0.0),
        data_loader=DataLoader(rows, batch_size=ROWS),
        noise_multiplier=0.0,
        max_grad_norm=C,
        expected_batch_size=ROWS,  # q = 1: everyone is in every batch
    )
    loss_fn = per_example_loss(model)
    with dpivon.BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=-(-ROWS // parts), optimizer=optimizer
    ) as batches:
        for some, y in batches:
            optimizer.zero_grad()
            loss_fn(private(**some), y).backward()
            optimizer.step()
    return [ROWS * p.grad for p in params], {type(module).__name__ for module in optimizer.source.alone_now}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize(("name", "task", "tuning"), CASES)
def test_clipped_sums_are_those_of_a_loop_over_examples(name, task, tuning, record_property):
    model = make(name, task, tuning).double()
    inputs, labels = make_batch(name, task, ROWS)
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    expected = clipped_by_a_loop(model, inputs, labels, task)
    size = float(torch.cat([t.flatten() for t in expected]).norm())
    assert size > C / 10
    for parts in (1, 2):  # micro-batches of one logical batch
        found, alone = released(copy.deepcopy(model), inputs, labels, parts)
        record_property("alone", " ".join(sorted(alone)))  # for the table in docs/transformers.md
        off = float(torch.cat([(a - b).flatten() for a, b in zip(found, expected, strict=True)]).norm())
        assert off <= 1e-10 * size, (parts, off / size)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(("name", "task", "tuning"), CASES)
def test_in_bf16_one_example_moves_the_sum_by_at_most_C(name, task, tuning, monkeypatch):
    check_neighbours(name, task, tuning, "cpu", monkeypatch)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("setting", ["gradient checkpointing", "use_cache", "no cache"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])  # tied embeddings; grouped-query attention
def test_settings_that_change_how_a_model_runs_change_no_sum(name, setting):
    model = make(name, "causal LM").double()
    inputs, labels = make_batch(name, "causal LM", ROWS)
    model.config.use_cache = setting == "use_cache"
    expected = clipped_by_a_loop(model, inputs, labels, "causal LM")
    if setting == "gradient checkpointing":
        model.gradient_checkpointing_enable()
        assert model.is_gradient_checkpointing
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (name == "gpt2")
    assert getattr(model.config, "num_key_value_heads", 2) == (1 if name == "llama" else 2)
    found, _ = released(model, inputs, labels)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "tuning"), sorted(REFUSED))
def test_what_cannot_be_attributed_is_refused(name, tuning):
    model = make(name, "causal LM", tuning)
    with pytest.raises(PrivacyError, match="not what the example gives alone"):
        released(model, *make_batch(name, "causal LM", ROWS))


def test_positions_that_serve_the_batch_are_refused_where_nothing_was_tried():
    model = make("gpt2", "sequence classification")
    keeper = BookKeeper(model, batch_first=True, loss_reduction="mean")
    with pytest.raises(PrivacyError, match=r"wpe' saw 1 rows in a batch of 5.*Keep the batch as the first dimension"):
        F.cross_entropy(model(input_ids=torch.randint(1, 12, (5, 6))).logits, torch.randint(3, (5,))).backward()
    keeper.clear()


def test_the_loss_that_a_model_takes_itself_is_refused_where_labels_are_ignored():
    model = make("gpt2", "causal LM")
    inputs, labels = make_batch("gpt2", "causal LM", ROWS)
    rows = [{**{key: value[i] for key, value in inputs.items()}, "labels": labels[i]} for i in range(ROWS)]
    private, optimizer, loader = dpivon.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(rows, batch_size=ROWS),
        noise_multiplier=1.0,
        max_grad_norm=C,
        expected_batch_size=ROWS,
    )
    loss = private(**next(iter(loader))).loss
    with pytest.raises(PrivacyError, match="ignore_index=-100 and reduction='mean'"):
        loss.backward()
    assert optimizer.last_release is None
