"""Stock transformers through engine.compile, with padding and labels of -100: the recorded program is the eager loop."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from compiled_runs import by_hand, private_run
from dpivon.errors import pip_line

pytest.importorskip("transformers", reason=pip_line("huggingface"))
pytest.importorskip("peft", reason=pip_line("huggingface"))
from transformer_models import MODELS, check_captured_neighbours, make, make_batch

from dpivon.integrations.huggingface import per_example_loss

pytestmark = pytest.mark.filterwarnings("ignore")
N, B = 24, 8
CASES = [(name, task, tuning) for tuning in ("all", "LoRA") for name, task in MODELS]
#: What is not captured, and why: modules that run example by example, or values that decide what runs.
EAGER = {
    ("mixtral", "all"): "example by example",
    ("mixtral", "LoRA"): "_local_scalar_dense",  # which experts are used
    ("t5", "all"): "example by example",
    ("clip", "all"): "example by example",
    ("opt", "all"): "_local_scalar_dense",  # a draw says whether a layer is dropped
    ("opt", "LoRA"): "_local_scalar_dense",
    ("whisper", "all"): "_local_scalar_dense",
    ("whisper", "LoRA"): "_local_scalar_dense",
    ("t5", "LoRA", "sequence classification"): "unique_consecutive",  # where each text ends
}


class Rows(Dataset):
    def __init__(self, name: str, task: str, masked: bool) -> None:
        torch.manual_seed(1)
        inputs, labels = make_batch(name, task, N)
        if not masked:
            inputs.pop("attention_mask")
        self.columns = {**inputs, "labels": labels}

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int):
        return {key: column[i] for key, column in self.columns.items()}


def trained(way: str, model, rows: Rows):
    """Parameters after two epochs, and the step."""
    engine, net, optimizer, loader = private_run(model, DataLoader(rows, batch_size=B), "adam")
    loss = per_example_loss(model)

    def losses(model, batch):
        inputs = {key: t for key, t in batch.items() if key != "labels"}
        return loss.per_example(model(**inputs).logits, batch["labels"])

    step = engine.compile(losses, capture=way == "recorded")
    for _ in range(2):
        for batch in loader:
            by_hand(losses, optimizer, net, batch, 1) if way == "loop" else step(batch)
    return torch.cat([p.detach().flatten() for p in optimizer.params]), step


@pytest.mark.campaign(keep=2)
@pytest.mark.parametrize(("name", "task", "tuning"), CASES)
def test_a_stock_model_is_recorded_and_learns_as_in_the_eager_loop(name, task, tuning, record_property):
    rows = Rows(name, task, masked=True)
    expected, _ = trained("loop", make(name, task, tuning), rows)
    found, step = trained("recorded", make(name, task, tuning), rows)
    record_property("path", step.path)  # for the table in docs/transformers.md
    reason = EAGER.get((name, tuning)) or EAGER.get((name, tuning, task))
    if reason is not None:
        assert re.search(rf"eager \(.*{reason}", step.path)
    else:
        assert step.path == "captured"
        assert all(program._recorded is not None for program in step._programs.values())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_gets_a_mask_only_where_texts_are_padded(masked):
    """A mask costs time, and models that are told that torch compiles them make one: they are told only where they must be."""
    model = make("gpt2", "causal LM")
    model.config.pad_token_id = None  # as GPT-2's own
    _, step = trained("recorded", model, Rows("gpt2", "causal LM", masked))
    (program,) = step._programs.values()
    calls = [node for node in program._recorded.graph.nodes if "scaled_dot_product" in str(node.target)]
    forward = [node for node in calls if "backward" not in str(node.target)]
    assert len(forward) == 2
    assert step._compiles == masked
    assert all((node.kwargs.get("attn_mask") is not None) == masked for node in forward)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_model_with_gradient_checkpointing_learns_the_same(name):
    """Layers run again in backward, where they must find what they found in forward."""
    rows, found = Rows(name, "causal LM", masked=True), {}
    for way in ("loop", "recorded"):
        model = make(name, "causal LM")
        model.gradient_checkpointing_enable()
        found[way], step = trained(way, model, rows)
    assert step.path == "captured"
    torch.testing.assert_close(found["recorded"], found["loop"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_one_example_moves_a_recorded_sum_of_gradients_too_large_to_make_by_at_most_C(name, monkeypatch):
    check_captured_neighbours(name, "cpu", monkeypatch)
