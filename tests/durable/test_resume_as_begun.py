"""A run goes on as it was begun: augmentations, clipping, update rule and schedule."""

from __future__ import annotations

import pytest
import torch
from resumable import Run

from dpivon import ArgumentError, Checkpoints
from dpivon.optim.curvature import resolve
from dpivon.optim.point import DPAGD, GRADIENT, PSI, SGD, Adam
from dpivon.optim.steady import Calm


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
def test_a_run_goes_on_with_the_augmentations_it_was_begun_with(tmp_path, mode):
    options = {"grad_sample_mode": mode}
    first = Run(tmp_path, "adam", augmentations=2, **options).train(stop_at=2)
    first.kept.save()
    first.close()
    for views in (1, 3):
        run = Run(tmp_path, "adam", augmentations=views, **options)
        with pytest.raises(ArgumentError, match=rf"augmentations={views}: but the run in .* was begun with 2"):
            run.kept.restore()
        run.close()
    whole = Run(tmp_path / "whole", "adam", augmentations=2, **options).train()
    assert torch.equal(Run(tmp_path, "adam", augmentations=2, **options).train().weights, whole.weights)


def calm(curvature):
    return Calm(resolve(curvature))


PER_LAYER = [0.5, 0.5, 0.5, 0.5]  # √Σ C_l² = 1, as the flat bound


OTHER_LAYERS = [0.1, 0.7, 0.1, 0.7]


@pytest.mark.campaign(keep=4)
@pytest.mark.parametrize(
    ("method", "begun", "changed", "words"),
    [
        ("adam", {}, {"clipping": "per_layer", "max_grad_norm": PER_LAYER}, "clipping='per_layer'.* with 'flat'"),
        ("adam", {"clipping": "per_layer", "max_grad_norm": PER_LAYER}, {}, "clipping='flat'.* with 'per_layer'"),
        (
            "adam",
            {"clipping": "per_layer", "max_grad_norm": PER_LAYER},
            {"clipping": "per_layer", "max_grad_norm": OTHER_LAYERS},
            r"max_grad_norm=\[0.1, 0.7, 0.1, 0.7\].* with \[0.5, 0.5, 0.5, 0.5\]",
        ),
        ("ivon", {}, {"mc_samples": 2}, "mc_samples=2.* with 1"),
        ("ivon", {"mc_samples": 3}, {"mc_samples": 2}, "mc_samples=2.* with 3"),
        ("ivon", {}, {"curvature": "reparam"}, "curvature='reparam'.* with 'gradsq-corrected'"),
        ("rule", {"rule": SGD()}, {"rule": Adam()}, "rule='adam'.* with 'sgd'"),
        ("rule", {"rule": calm("averaged")}, {"rule": calm("whole")}, "curvature='whole'.* with 'averaged'"),
        ("rule", {"rule": DPAGD()}, {"rule": DPAGD(GRADIENT)}, "phi='gradient'.* with 'average'"),
        ("rule", {"rule": DPAGD()}, {"rule": DPAGD(psi=PSI["one"])}, "psi='one'.* with 'square-average'"),
    ],
)
def test_a_run_goes_on_by_the_clipping_and_the_steps_it_was_begun_with(tmp_path, method, begun, changed, words):
    """Bounds of one norm, so that σ, C and every charge are alike: nothing else would tell."""
    first = Run(tmp_path, method, **begun).train(stop_at=2)
    first.kept.save()
    first.close()
    run = Run(tmp_path, method, **changed)
    with pytest.raises(ArgumentError, match=rf"^{words}\. Go on with what the run was begun with"):
        run.kept.restore()
    assert run.engine.ledger.record.releases == 2
    run.close()
    whole = Run(tmp_path / "whole", method, **begun).train()
    assert torch.equal(Run(tmp_path, method, **begun).train().weights, whole.weights)


def test_a_scheduler_of_c_is_no_other_clipping(tmp_path):
    per_layer = {"clipping": "per_layer", "max_grad_norm": PER_LAYER}
    first = Run(tmp_path, "adam", **per_layer).train(stop_at=2)
    first.optimizer.max_grad_norm = 0.5
    first.kept.save()
    first.close()
    second = Run(tmp_path, "adam", **per_layer)
    assert second.kept.restore().steps == 2
    assert second.optimizer.clipping.given == [0.25] * 4


@pytest.mark.campaign(keep=3)
@pytest.mark.parametrize(
    ("method", "options", "since"),
    [
        ("adam", {"augmentations": 1}, ("augmentations",)),
        ("adam", {"augmentations": 2}, ("augmentations",)),
        ("adam", {"clipping": "flat"}, ("clipping",)),
        ("adam", {"clipping": "per_layer", "max_grad_norm": OTHER_LAYERS}, ("clipping",)),
        ("ivon", {"mc_samples": 2, "curvature": "gradsq"}, ("mc_samples", "curvature")),
        ("rule", {"rule": SGD()}, ("rule",)),
    ],
)
def test_a_checkpoint_from_before_this_was_written_down_goes_on(tmp_path, monkeypatch, method, options, since):
    with monkeypatch.context() as patch:
        now = Checkpoints._fingerprint

        def before(self):
            norm = {"max_grad_norm": self._optimizer.first_spec.max_grad_norm} if "clipping" in since else {}
            return {k: v for k, v in (now(self) | norm).items() if k not in since}

        patch.setattr(Checkpoints, "_fingerprint", before)
        first = Run(tmp_path, method, **options).train(stop_at=2)
        first.kept.save()
        first.close()
    assert not set(since) & set(first.kept._files.read()["config"])
    if since == ("clipping",):
        with pytest.raises(ArgumentError, match=r"max_grad_norm=2.0: .* begun with (1.0|0.99)"):
            (other := Run(tmp_path, method, max_grad_norm=2.0)).kept.restore()
        other.close()
    whole = Run(tmp_path / "whole", method, **options).train()
    second = Run(tmp_path, method, **options).train()
    assert torch.equal(second.weights, whole.weights)
    second.kept.save()
    written = second.kept._files.read()["config"]
    for name, value in options.items():
        assert written[name] == getattr(value, "name", value)


def test_a_scheduler_goes_on_where_it_was(tmp_path):
    def scheduled(folder):
        run = Run.__new__(Run)
        Run.__init__(run, folder, "adam")
        run.scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
        run.kept._also["scheduler"] = run.scheduler
        step = run.step
        run.step = lambda x, y: (step(x, y), run.scheduler.step())
        return run

    whole = scheduled(tmp_path / "a").train()
    first = scheduled(tmp_path / "b").train(stop_at=4)
    first.kept.save()
    first.close()
    second = scheduled(tmp_path / "b").train()
    assert second.scheduler.get_last_lr() == whole.scheduler.get_last_lr()
    assert torch.equal(second.weights, whole.weights)
