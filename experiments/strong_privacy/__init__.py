"""Strong privacy: the recipe against tuned baselines, and the ablations."""

from experiments.strong_privacy import estimators  # registers what its studies name

__all__ = ["estimators"]
