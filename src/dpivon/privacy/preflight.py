"""Look at the data before step 0, openly: **this is not private**.

Once training has begun no error depends on data: a record that is not finite contributes zero, and nobody learns of it. So
what is wrong with the data has to be found before, by its owner. The answer of :func:`preflight` is about single
records: keep it with the data, and publish neither it nor the fact that a record was removed because of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpivon.errors import bad, check_whole

_SAMPLES_AT_ONCE = 4096


def preflight(dataset: Any, classes: int | None = None) -> int:
    """Refuse data that training would silently lose examples of; otherwise the number of examples. Not private.

    >>> dpivon.preflight(train_set, classes=10)

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
            raise bad("labels", len(labels), f"does not match {len(inputs)} inputs", "Give one label an input")
        for begin in range(0, len(inputs), _SAMPLES_AT_ONCE):
            rows = slice(begin, begin + _SAMPLES_AT_ONCE)
            _check(inputs[rows], labels[rows], begin, classes)
        number = len(inputs)
    elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        number = len(dataset)
        for i in range(number):
            record = dataset[i]
            if not isinstance(record, tuple | list) or len(record) != 2:
                raise bad("dataset", type(record).__name__, f"record {i} is no pair", "Let it be (input, label)")
            _check(torch.as_tensor(record[0])[None], torch.as_tensor(record[1])[None], i, classes)
    else:
        raise bad("dataset", type(dataset).__name__, "has no length and items", "Pass a dataset or (inputs, labels)")
    if number == 0:
        raise bad("dataset", "an empty dataset", "there is nothing to train on", "Check the path or the filter")
    return number


def _check(inputs: Tensor, labels: Tensor, first: int, classes: int | None) -> None:
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
