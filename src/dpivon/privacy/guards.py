"""What must hold of model, optimizer and data before and while they are trained privately."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer as OpacusDPOptimizer
from opacus.validators.errors import UnsupportedModuleError
from opacus.validators.module_validator import ModuleValidator
from torch import Tensor, nn
from torch.optim import Optimizer

from dpivon.errors import ArgumentError, bad, check_whole
from dpivon.optim.ivon import IVON

_SAMPLES_AT_ONCE = 4096


class UnsupportedModelError(ArgumentError, UnsupportedModuleError):  # type: ignore[misc]
    """A model that cannot be trained privately; also Opacus's error of that meaning."""


def check_model(module: nn.Module) -> None:
    """A model whose per-example gradients mean something."""
    if isinstance(module, AbstractGradSampleModule) or hasattr(module, "autograd_grad_sample_hooks"):
        raise bad("module", type(module).__name__, "is already private", "Pass the plain module, and only once")
    trainable = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not trainable:
        raise bad("module", type(module).__name__, "has no trainable parameters", "Set requires_grad on some")
    for name, p in trainable:
        if p.dtype == torch.float16:
            problem = "sums of clipped gradients lose the guarantee in fp16"
            raise bad(f"module.{name}", p.dtype, problem, "Use module.float() and, for speed, bf16 autocast")
        if p.is_complex():
            raise bad(f"module.{name}", p.dtype, "complex gradients have no norm here", "Keep real and imaginary parts")
    devices = sorted({str(p.device) for _, p in trainable})
    if len(devices) > 1:
        raise bad("module", devices, "has parameters on several devices", "Move it with module.to(device)")
    for name, layer in module.named_modules():
        mixes = layer.training or not getattr(layer, "track_running_stats", True)
        # Opacus looks at trainable layers only, and would let one with affine=False pass.
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and mixes:
            raise UnsupportedModelError(
                f"module.{name}={type(layer).__name__}: normalises over the batch, so one example changes all gradients. "
                "Use GroupNorm; PrivacyEngine.get_compatible_module(module) replaces it."
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and (layer.max_norm or layer.scale_grad_by_freq):
            option = "max_norm" if layer.max_norm else "scale_grad_by_freq"
            why = "rewrites the rows that are looked up" if layer.max_norm else "counts over the whole batch"
            raise UnsupportedModelError(
                f"module.{name}={type(layer).__name__}({option}={getattr(layer, option)}): {why}, so one example shows outside "
                "its clipped gradient. Make the embedding without it."
            )
        if isinstance(layer, torch.jit.ScriptModule):
            problem = "is compiled and cannot be watched"
            raise bad(f"module.{name}", type(layer).__name__, problem, "Pass the plain module")
    problems = ModuleValidator.validate(module, strict=False)
    # We have a rule for the attention that Opacus asks to be replaced.
    problems = [p for p in problems if "nn.MultiheadAttention" not in str(p)]
    if problems:
        raise UnsupportedModelError(
            f"module={type(module).__name__}: {str(problems[0]).split('. ')[0].rstrip('. ')}. "
            "PrivacyEngine.get_compatible_module(module) replaces what can be replaced."
        )


def check_optimizer(module: nn.Module, optimizer: Optimizer) -> Optimizer:
    """An optimizer of this model's parameters that learns only from what the boundary hands it; the one inside accelerate's."""
    if type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    if isinstance(optimizer, OpacusDPOptimizer):
        fix = "Pass the plain optimizer, and only once"
        raise bad("optimizer", type(optimizer).__name__, "is already private", fix)
    if hasattr(optimizer, "sampled_params") and not isinstance(optimizer, IVON):
        name = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        problem = "captures raw gradients on leaving sampled_params, before they are clipped and noised"
        raise bad("optimizer", name, problem, "Use dpivon.IVON")
    names = {p: name for name, p in module.named_parameters()}
    optimised = set(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    strangers = [p for p in optimised if p not in names]
    if strangers:
        raise bad(
            "optimizer",
            f"{len(strangers)} parameter(s), the first of shape {tuple(strangers[0].shape)}",
            "Module parameters are different than optimizer Parameters",
            "Make the optimizer from module.parameters(), after the module was fixed or moved",
        )
    left_out = [name for p, name in names.items() if p.requires_grad and p not in optimised]
    if left_out:
        problem = f"{len(left_out)} trainable parameter(s) of the module are not in it"
        raise bad(
            "optimizer", f"without {left_out[0]!r}", problem, "Add them, or freeze them with requires_grad_(False)"
        )
    return optimizer


def preflight(dataset: Any, classes: int | None = None) -> int:
    """Refuse data that training would silently lose examples of; otherwise the number of examples. **Not private.**

    >>> dpivon.preflight(train_set, classes=10)

    Once training has begun no error depends on data: a record that is not finite silently contributes zero.
    So its owner looks before step 0. The answer is about single records: keep it with the data, and publish neither it nor
    the fact that a record was removed because of it.

    Inputs have to be finite. A label of −100, which torch's losses leave out, is among those refused: their mean would then
    divide by fewer rows than the engine multiplies by.

    Args:
        dataset: a dataset of (input, label) pairs, or the pair of tensors (inputs, labels).
        classes: if given, labels have to be whole numbers in 0 … classes − 1.
    """
    if classes is not None:
        classes = check_whole("classes", classes, "Use the number of classes", at_least=2)
    if isinstance(dataset, tuple | list) and len(dataset) == 2 and all(isinstance(t, Tensor) for t in dataset):
        inputs, labels = dataset
        if len(inputs) != len(labels):
            raise bad("labels", len(labels), f"does not match {len(inputs)} inputs", "Give one label per input")
        for begin in range(0, len(inputs), _SAMPLES_AT_ONCE):
            rows = slice(begin, begin + _SAMPLES_AT_ONCE)
            _check_records(inputs[rows], labels[rows], begin, classes)
        number = len(inputs)
    elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        number = len(dataset)
        for i in range(number):
            record = dataset[i]
            if not isinstance(record, tuple | list) or len(record) != 2:
                raise bad("dataset", type(record).__name__, f"record {i} is not a pair", "Let it be (input, label)")
            _check_records(torch.as_tensor(record[0])[None], torch.as_tensor(record[1])[None], i, classes)
    else:
        raise bad("dataset", type(dataset).__name__, "has no length and items", "Pass a dataset or (inputs, labels)")
    if number == 0:
        raise bad("dataset", "an empty dataset", "there is nothing to train on", "Check the path or the filter")
    return number


def _check_records(inputs: Tensor, labels: Tensor, first: int, classes: int | None) -> None:
    finite = torch.isfinite(inputs).flatten(1).all(1) if inputs.dim() > 1 else torch.isfinite(inputs)
    if not bool(finite.all()):
        where = first + int((~finite).nonzero()[0])
        raise bad("inputs", f"record {where}", "is not finite", "Remove or repair it; it would contribute nothing")
    if classes is None:
        return
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise bad("labels", labels.dtype, "are not whole numbers", "Convert them with labels.long()")
    outside = (labels < 0) | (labels >= classes)
    outside = outside.flatten(1).any(1) if outside.dim() > 1 else outside
    if bool(outside.any()):
        at = int(outside.nonzero()[0])
        value = labels[at].tolist()
        fix = "Remove or relabel it; for labels to be left out use dpivon.PerExampleLoss"
        raise bad("labels", value, f"of record {first + at} is not in 0 … {classes - 1}", fix)
