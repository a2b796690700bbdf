"""How things are used: outputs, micro-batches, several passes, optimizers, strange rows, Hugging Face's models."""

from __future__ import annotations

import importlib.util
import math
from collections import namedtuple
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from attack_case import CLASSES, FEATURES, Net, case, ce, ce_each, images, mlp, vectors
from torch import Tensor, nn

import dpivon

LOOP = ("own loop", "ddp")


@dataclass
class Output:
    logits: Tensor


class Answer:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


Named = namedtuple("Named", ("logits", "hidden"))

_OUTPUTS = {
    "a dict": (lambda z: {"logits": z}, lambda o: o["logits"]),
    "a list": (lambda z: [z], lambda o: o[0]),
    "a tuple": (lambda z: (z, z.detach()), lambda o: o[0]),
    "a namedtuple": (lambda z: Named(z, z.detach()), lambda o: o.logits),
    "a dataclass": (Output, lambda o: o.logits),
    "an object": (Answer, lambda o: o.logits),
}
for _name, (_wrap, _get) in _OUTPUTS.items():

    @case(f"outputs in {_name}", must=True, whole=True, each=None)
    def _(wrap=_wrap, get=_get):
        net = Net(lambda m, x: wrap(m.net(x)), net=mlp())
        return net, vectors(), lambda model, batch: ce(get(model(batch[0])), batch[1])


@case("outputs in a dict, to fit", paths=("fit", "stacked"), each=lambda o, y: ce_each(o["logits"], y))
def _():
    return Net(lambda m, x: {"logits": m.net(x)}, net=mlp()), vectors(), lambda o, y: ce(o["logits"], y)


@case("two heads and two losses", must=True, whole=True, each=None)
def _():
    net = Net(
        lambda m, x: (m.a(m.body(x)), m.b(m.body(x))), body=nn.Linear(FEATURES, 6), a=nn.Linear(6, 3), b=nn.Linear(6, 1)
    )

    def loss(model, batch):
        z, r = model(batch[0])
        return ce(z, batch[1]) + r.square().mean()

    return net, vectors(), loss


# ---- loops


def _micro(run):
    with dpivon.BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer) as parts:
        for batch in parts:
            run.step(batch)


@case("micro-batches by BatchMemoryManager", must=True, loop=_micro, paths=("own loop",))
def _():
    return mlp(), vectors(), ce


def _twice_backward(run):
    for batch in run.batches():
        run.optimizer.zero_grad()
        run.loss(batch).backward()
        run.loss(batch).backward()
        run.optimizer.step()


@case("two forwards and backwards before a step", 2, loop=_twice_backward, paths=LOOP, fast=True)
def _():
    return mlp(), vectors(), ce


def _second_backward(run):
    for batch in run.batches():
        run.optimizer.zero_grad()
        loss = run.loss(batch)
        loss.backward(retain_graph=True)
        loss.backward()
        run.optimizer.step()


@case("backward twice through one forward", 2, loop=_second_backward, paths=LOOP)
def _():
    return mlp(), vectors(), ce


def _two_steps(run):
    for batch in run.batches():
        run.step(batch)
        run.step(batch)


@case("two steps on one batch", 6, loop=_two_steps, paths=LOOP)
def _():
    return mlp(), vectors(), ce


@case("the loss multiplied by the batch size in the loop", 7, whole=True, each=None, paths=LOOP)
def _():
    return mlp(), vectors(), lambda model, batch: ce(model(batch[0]), batch[1]) * len(batch[1]) / 4


def _by_layers(run):
    """Layers called one by one instead of their model."""
    for x, y in run.batches():
        run.optimizer.zero_grad()
        net = run.module
        ce(net[2](net[1](net[0](x))), y).backward()
        run.optimizer.step()


@case("layers called outside of their model", 16, loop=_by_layers, paths=LOOP)
def _():
    return mlp(), vectors(), ce


def _the_bare_module(run):
    for x, y in run.batches():
        run.optimizer.zero_grad()
        ce(run.module(x), y).backward()
        run.optimizer.step()


@case("the module called instead of the private model", 16, loop=_the_bare_module, paths=LOOP)
def _():
    return mlp(), vectors(), ce


def _empty_first(run):
    """An empty batch must be released as any other; then an ordinary one."""
    for batch in run.batches():
        run.optimizer.zero_grad()
        inputs, targets = (t[:0] for t in batch)
        (run.model(inputs).sum() * 0.0 + F.cross_entropy(run.model(inputs), targets, reduction="sum")).backward()
        run.optimizer.zero_grad()
        run.step(batch)


@case("an empty batch before the real one", loop=_empty_first, paths=("own loop",))
def _():
    return mlp(), vectors(), ce


def _only_empty(run):
    for inputs, targets in run.batches():
        run.optimizer.zero_grad()
        F.cross_entropy(run.model(inputs[:0]), targets[:0], reduction="sum").backward()
        run.optimizer.step()


@case("only empty batches", loop=_only_empty, paths=("own loop",), tolerance=None)
def _():
    return mlp(), vectors(), ce


@case("a batch of two", must=True)
def _():
    return mlp(), vectors(2), ce


def _by_closure(run):
    for batch in run.batches():

        def closure(batch=batch):
            run.optimizer.zero_grad()
            loss = run.loss(batch)
            loss.backward()
            return loss

        run.optimizer.step(closure)


@case("step with a closure", must=True, loop=_by_closure, paths=LOOP)
def _():
    return mlp(), vectors(), ce


def _sampled(run):
    for batch in run.batches():
        run.optimizer.zero_grad()
        for _ in range(run.optimizer.original_optimizer.mc_samples):
            with run.optimizer.sampled_params(train=True):
                run.note_theta()
                run.loss(batch).backward()
        run.optimizer.step()


for _samples in (1, 2):

    @case(
        f"IVON, mc_samples={_samples}",
        must=True,
        loop=_sampled,
        paths=LOOP,
        optimizer=lambda params, k=_samples: dpivon.IVON(params, lr=1e-30, ess=1e4, mc_samples=k),
    )
    def _():
        return mlp(), vectors(), ce


def _views(model, batch):
    x, y = batch
    return ce(model(x.flatten(0, 1)), y.repeat_interleave(2))


@case("two augmentations", must=True, whole=True, each=None, options={"augmentations": 2}, paths=LOOP)
def _():
    x, y = vectors()
    return mlp(), (torch.stack([x, x + 0.3], 1), y), _views


@case("two augmentations that were not declared", 2, whole=True, each=None, paths=LOOP, fast=True)
def _():
    x, y = vectors()
    return mlp(), (torch.stack([x, x + 0.3], 1), y), _views


@case("per-layer clipping", must=True, options={"clipping": "per_layer"}, paths=LOOP)
def _():
    return mlp(), vectors(), ce


@case(
    "two parameter groups",
    must=True,
    paths=LOOP,
    optimizer=lambda params: torch.optim.SGD([{"params": [q], "lr": 0.0} for q in reversed(list(params))], lr=0.0),
)
def _():
    return mlp(), vectors(), ce


@case("Adam", must=True, paths=LOOP, optimizer=lambda params: torch.optim.Adam(params, lr=0.0))
def _():
    return mlp(), vectors(), ce


@case("hooks of the model instead of a wrapper", must=True, options={"wrap_model": False}, paths=LOOP)
def _():
    return mlp(), vectors(), ce


for _mode in ("bookkeeping", "hooks", "functorch", "ew", "ghost"):

    @case(f"two linear layers, mode {_mode}", must=True, options={"grad_sample_mode": _mode}, paths=("own loop",))
    def _():
        return mlp(), vectors(), nn.CrossEntropyLoss()


# ---- strange rows


def _strange(value, label=None):
    x, y = vectors()
    x[4] = value
    return mlp(), (x, y), ce


for _name, _value in {"NaN": math.nan, "Inf": math.inf, "3e38": 3e38, "1e-40": 1e-40}.items():

    @case(f"a row of {_name}", must=_name in ("NaN", "Inf"), fast=_name == "NaN")
    def _(value=_value):
        return _strange(value)


@case("a row of NaN under a mask")
def _():
    x, y = vectors()
    x[4] = math.nan
    return Net(lambda m, x: m.net(torch.where(x.isnan(), 0.0, x)), net=mlp()), (x, y), ce


@case("rows of zeros", must=True)
def _():
    x, y = vectors()
    return mlp(), (torch.cat([torch.zeros(5, FEATURES), x[5:]]), y), ce


@case("constant outputs without a gradient")
def _():
    return Net(lambda m, x: m.net(x) * 0.0, net=mlp()), vectors(), ce


@case("torch.no_grad inside the model")
def _():
    def run(m, x):
        with torch.no_grad():
            h = m.body(x)
        return m.out(h)

    return Net(run, body=nn.Linear(FEATURES, 6), out=nn.Linear(6, CLASSES)), vectors(), ce


@case("a model compiled by torch.jit.script", paths=LOOP)
def _():
    return torch.jit.script(mlp()), vectors(), ce


@case("a model called twice with different images in one step", 2, whole=True, each=None)
def _():
    def loss(model, batch):
        x, y = batch
        return (ce(model(x), y) + ce(model(x.flip(3)), y)) / 2

    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, CLASSES)), images(), loss


# ---- Hugging Face


def _hugging(name):
    import transformers as hf

    small = {"vocab_size": 11, "max_position_embeddings": 16, "num_labels": CLASSES, "pad_token_id": 0}
    wide = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "bert":
        return hf.BertForSequenceClassification(hf.BertConfig(**small, **wide, **still))
    if name == "distilbert":
        tiny = {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 8, "dropout": 0.0, "attention_dropout": 0.0}
        config = hf.DistilBertConfig(**small, **tiny, seq_classif_dropout=0.0)
        return hf.DistilBertForSequenceClassification(config)
    if name == "gpt2":
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = hf.GPT2Config(
            vocab_size=11,
            n_positions=16,
            n_embd=8,
            n_layer=1,
            n_head=2,
            num_labels=CLASSES,
            bos_token_id=0,
            eos_token_id=0,
            **none,
        )
        config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
        return hf.GPT2ForSequenceClassification(config)
    config = hf.OPTConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=1, ffn_dim=8, max_position_embeddings=16, num_attention_heads=2,
        word_embed_proj_dim=8, pad_token_id=1, dropout=0.0, num_labels=CLASSES,
    )  # fmt: skip
    return hf.OPTForSequenceClassification(config)


def _make_hugging(name, variant):
    model = Net(lambda m, given: m.net(**given), net=_hugging(name))
    ids = torch.randint(2, 11, (9, 6))
    y = torch.randint(CLASSES, (9,))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if variant != "as it comes":
        given["position_ids"] = torch.arange(6).repeat(9, 1)  # by default one row of them serves the whole batch
        if name == "bert":
            given["token_type_ids"] = torch.zeros_like(ids)
    if variant == "its own loss":
        return model, ({**given, "labels": y}, y), lambda model, batch: model(batch[0]).loss
    return model, (given, y), lambda model, batch: ce(model(batch[0]).logits, batch[1])


if importlib.util.find_spec("transformers") is not None:
    for _name in ("bert", "distilbert", "gpt2", "opt"):
        for _variant in ("as it comes", "position_ids given", "its own loss"):

            @case(
                f"Hugging Face {_name}, {_variant}",
                must=_variant == "position_ids given" and _name in ("bert", "gpt2"),
                whole=True,
                each=None,
                paths=LOOP,
            )
            def _(name=_name, variant=_variant):
                return _make_hugging(name, variant)
