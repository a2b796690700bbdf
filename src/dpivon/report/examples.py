"""The test examples that the model is surest and least sure of."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import torch

from dpivon.report.page import Section
from dpivon.report.run_folder import RunFolder, TestSet

MOST = 12


def section(run: RunFolder) -> Section:
    title = "Most and least certain test examples"
    if run.test is None:
        return Section(
            "examples", title, left_out="No test data was given, and examples of no other data are ever shown."
        )
    t = run.test
    entropy = -(t.averaged.double().clamp_min(1e-300).log() * t.averaged.double()).sum(1)
    places = torch.tensor(t.index) if t.images is not None else torch.arange(len(t.labels))
    order = places[entropy[places].argsort(stable=True)].tolist()
    half = min(MOST, (len(order) + 1) // 2)
    pictures = dict(zip(t.index, t.images, strict=True)) if t.images is not None else {}
    surest, least = (
        [_example(t, i, run.classes, pictures) for i in part] for part in (order[:half], order[half:][::-1][:half])
    )
    return Section("examples", title, "examples.html", {"groups": (("Most certain", surest), ("Least certain", least))})


def _example(t: TestSet, i: int, classes: tuple[str, ...], pictures: dict[int, Any]) -> dict[str, Any]:
    probability, predicted = t.averaged[i].max(0)
    return {
        "index": i,
        "true": classes[int(t.labels[i])],
        "predicted": classes[int(predicted)],
        "right": int(predicted) == int(t.labels[i]),
        "probability": float(probability),
        "picture": _png(pictures[i]) if i in pictures else "",
    }


def _png(pixels: np.ndarray[Any, Any]) -> str:
    """As a data address; small pictures are enlarged without smoothing, so that their pixels can be seen."""
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(pixels))
    times = max(1, 64 // max(picture.size))
    file = io.BytesIO()
    picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST).save(
        file, "png", optimize=True
    )
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
