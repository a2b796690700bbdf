"""Networks that everybody writes: nearly all of them must be right."""

from __future__ import annotations

import torch
from attack_case import CLASSES, FEATURES, Net, case, ce, images, labels, mlp, sequences, square, tokens, vectors
from opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention
from torch import nn
from torch.nn.utils import parametrizations


@case("two linear layers", must=True, fast=True)
def _():
    return mlp(), vectors(), ce


@case("linear without bias, squared error", must=True)
def _():
    return nn.Linear(FEATURES, 1, bias=False), vectors(), square


@case("in-place ReLU", must=True, fast=True)
def _():
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(inplace=True), nn.Linear(6, CLASSES)), vectors(), ce


@case("CNN with pooling", must=True, fast=True)
def _():
    layers = nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, CLASSES)
    return nn.Sequential(*layers), images(), ce


for _name, _norm in {
    "LayerNorm": lambda: nn.LayerNorm(6),
    "GroupNorm": lambda: nn.GroupNorm(2, 6),
    "RMSNorm": lambda: nn.RMSNorm(6),
    "LayerNorm without affine": lambda: nn.LayerNorm(6, elementwise_affine=False),
}.items():

    @case(_name, must=_name != "RMSNorm", fast=_name == "GroupNorm")
    def _(norm=_norm):
        return mlp(norm()), vectors(), ce


@case("InstanceNorm2d with affine", must=True)
def _():
    layers = nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)
    return nn.Sequential(*layers), images(), ce


@case("InstanceNorm1d on [B, C, L]", must=True)
def _():
    layers = nn.InstanceNorm1d(5, affine=True), nn.Flatten(), nn.Linear(20, CLASSES)
    return nn.Sequential(*layers), sequences(), ce


@case("InstanceNorm2d with running statistics", 1)
def _():
    layers = nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(64, CLASSES)), images(), ce


@case("PReLU on examples", fast=True)
def _():
    return mlp(nn.PReLU(6)), vectors(), ce


@case("embedding and mean over tokens", must=True, fast=True)
def _():
    parts = {"emb": nn.Embedding(7, 6), "out": nn.Linear(6, CLASSES)}
    return Net(lambda m, x: m.out(m.emb(x).mean(1)), **parts), tokens(), ce


@case("embedding with padding_idx", 16, must=True, fast=True)
def _():
    parts = {"emb": nn.Embedding(7, 6, padding_idx=0), "out": nn.Linear(6, CLASSES)}
    return Net(lambda m, x: m.out(m.emb(x).mean(1)), **parts), tokens(), ce


for _mode in ("hooks", "functorch", "ew", "ghost"):

    @case(f"embedding with padding_idx, mode {_mode}", 16, options={"grad_sample_mode": _mode}, paths=("own loop",))
    def _():
        parts = {"emb": nn.Embedding(7, 6, padding_idx=0), "out": nn.Linear(6, CLASSES)}
        return Net(lambda m, x: m.out(m.emb(x).mean(1)), **parts), tokens(), nn.CrossEntropyLoss()


@case("embedding that scales by frequency in the batch", 13)
def _():
    parts = {"emb": nn.Embedding(7, 6, scale_grad_by_freq=True), "out": nn.Linear(6, CLASSES)}
    return Net(lambda m, x: m.out(m.emb(x).mean(1)), **parts), tokens(), ce


@case("sparse embedding")
def _():
    parts = {"emb": nn.Embedding(7, 6, sparse=True), "out": nn.Linear(6, CLASSES)}
    return Net(lambda m, x: m.out(m.emb(x).mean(1)), **parts), tokens(), ce


for _kind in ("mean", "sum", "max"):

    @case(f"EmbeddingBag, {_kind}")
    def _(kind=_kind):
        parts = {"bag": nn.EmbeddingBag(7, 6, mode=kind), "out": nn.Linear(6, CLASSES)}
        return Net(lambda m, x: m.out(m.bag(x)), **parts), tokens(), ce


@case("Bilinear")
def _():
    parts = {"two": nn.Bilinear(FEATURES, FEATURES, 6), "out": nn.Linear(6, CLASSES)}
    return Net(lambda m, x: m.out(m.two(x, x.flip(1)).tanh()), **parts), vectors(), ce


for _name, _cell in {
    "nn.LSTM": lambda: nn.LSTM(FEATURES, 5, batch_first=True),
    "nn.GRU": lambda: nn.GRU(FEATURES, 5, batch_first=True),
    "nn.RNN": lambda: nn.RNN(FEATURES, 5, batch_first=True),
    "bidirectional nn.LSTM of two layers": lambda: nn.LSTM(FEATURES, 5, 2, batch_first=True, bidirectional=True),
    "DPLSTM": lambda: DPLSTM(FEATURES, 5, batch_first=True),
    "DPGRU": lambda: DPGRU(FEATURES, 5, batch_first=True),
}.items():

    @case(_name, 2 if "DP" in _name else "—", must="DP" in _name)
    def _(cell=_cell, width=10 if "bi" in _name else 5):
        parts = {"cell": cell(), "out": nn.Linear(width, CLASSES)}
        return Net(lambda m, x: m.out(m.cell(x)[0][:, -1]), **parts), sequences(), ce


def _attention(m, x, mask=None):
    return m.out(m.att(x, x, x, need_weights=False, attn_mask=mask)[0].mean(1))


@case("MultiheadAttention", must=True, fast=True)
def _():
    parts = {"att": nn.MultiheadAttention(FEATURES, 2, batch_first=True), "out": nn.Linear(FEATURES, CLASSES)}
    return Net(_attention, **parts), sequences(), ce


@case("MultiheadAttention with a causal mask", must=True)
def _():
    parts = {"att": nn.MultiheadAttention(FEATURES, 2, batch_first=True), "out": nn.Linear(FEATURES, CLASSES)}
    mask = torch.triu(torch.full((5, 5), -torch.inf), 1)
    return Net(lambda m, x: _attention(m, x, m.mask.to(x.dtype)), mask=mask, **parts), sequences(), ce


@case("MultiheadAttention with a padding mask per example")
def _():
    def run(m, x):
        empty = x[..., 0] > 0.8
        empty[:, 0] = False
        return m.out(m.att(x, x, x, key_padding_mask=empty, need_weights=False)[0].mean(1))

    parts = {"att": nn.MultiheadAttention(FEATURES, 2, batch_first=True), "out": nn.Linear(FEATURES, CLASSES)}
    return Net(run, **parts), sequences(), ce


@case("MultiheadAttention that attends over the batch", 13, fast=True)
def _():
    parts = {"att": nn.MultiheadAttention(FEATURES, 2), "out": nn.Linear(FEATURES, CLASSES)}  # not batch_first
    return Net(_attention, **parts), sequences(), ce


@case("DPMultiheadAttention", must=True)
def _():
    parts = {"att": DPMultiheadAttention(FEATURES, 2, batch_first=True), "out": nn.Linear(FEATURES, CLASSES)}
    return Net(lambda m, x: m.out(m.att(x, x, x)[0].mean(1)), **parts), sequences(), ce


for _first in (True, False):

    @case(f"TransformerEncoderLayer, norm_first={_first}", must=True)
    def _(first=_first):
        layer = nn.TransformerEncoderLayer(FEATURES, 2, 6, dropout=0.0, batch_first=True, norm_first=first)
        return Net(lambda m, x: m.out(m.enc(x).mean(1)), enc=layer, out=nn.Linear(FEATURES, CLASSES)), sequences(), ce


@case("dropout", must=True, tolerance=None, removed=(8,))
def _():
    return mlp(nn.Dropout(0.5)), vectors(), ce


@case("a layer that is never used", must=True, fast=True)
def _():
    parts = {"layers": nn.ModuleList([nn.Linear(FEATURES, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)])}
    return Net(lambda m, x: m.layers[2](m.layers[0](x).tanh()), **parts), vectors(), ce


@case("frozen first layer", must=True, fast=True)
def _():
    model = mlp()
    model[0].requires_grad_(False)
    return model, vectors(), ce


@case("frozen bias")
def _():
    model = mlp()
    model[0].bias.requires_grad_(False)
    return model, vectors(), ce


@case("one layer used three times", must=True, fast=True)
def _():
    parts = {"first": nn.Linear(FEATURES, 6), "mid": nn.Linear(6, 6), "out": nn.Linear(6, CLASSES)}
    return Net(lambda m, x: m.out(m.mid(m.mid(m.mid(m.first(x)).tanh()).tanh())), **parts), vectors(), ce


@case("weights tied between two layers")
def _():
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))
    model[2].weight = model[0].weight
    return model, vectors(), ce


@case("embedding tied to the head of a language model", must=True)
def _():
    from attack_case import token_ce

    emb, head = nn.Embedding(CLASSES, 6), nn.Linear(6, CLASSES, bias=False)
    head.weight = emb.weight
    return Net(lambda m, x: m.head(m.emb(x).tanh()), emb=emb, head=head), (labels(9, 5), labels(9, 5)), token_ce


@case("spectral_norm, old style", 1)
def _():
    model = mlp()
    nn.utils.spectral_norm(model[0])
    return model, vectors(), ce


@case("spectral_norm, parametrized", 1)
def _():
    model = mlp()
    parametrizations.spectral_norm(model[0])
    return model, vectors(), ce


@case("weight_norm, parametrized", 16)
def _():
    model = mlp()
    parametrizations.weight_norm(model[0])
    return model, vectors(), ce


@case("weights made symmetric by parametrize", 16)
def _():
    class Symmetric(nn.Module):
        def forward(self, w):
            return w + w.T

    layer = nn.Linear(FEATURES, FEATURES)
    nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(FEATURES, CLASSES)), vectors(), ce


for _name, _bn in {
    "BatchNorm1d": lambda: nn.BatchNorm1d(6),
    "BatchNorm1d without affine": lambda: nn.BatchNorm1d(6, affine=False),
    "BatchNorm1d without running statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(6),
}.items():

    @case(_name, 13, fast=_name == "BatchNorm1d")
    def _(norm=_bn):
        return mlp(norm()), vectors(), ce


@case("BatchNorm1d put into eval mode", 13)
def _():
    model = mlp(nn.BatchNorm1d(6))
    model[1].eval()
    return model, vectors(), ce


@case("functional batch_norm", 13)
def _():
    parts = {"fc": nn.Linear(FEATURES, 6), "out": nn.Linear(6, CLASSES)}
    run = lambda m, x: m.out(nn.functional.batch_norm(m.fc(x), None, None, training=True).tanh())  # noqa: E731
    return Net(run, **parts), vectors(), ce
