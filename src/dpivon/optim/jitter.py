"""Gradients at draws around the mean, so wide as the weights are large.

A rule that trains at its mean fits a point. With a jitter j every step takes its gradients at one draw

    θ ~ N(m, (j w)² I),   w the root mean square of the first weights

so what it descends is E_q[loss], the loss of the Gaussian q of that width: variational inference with a width that is
given, in the one unit a width can be compared with. DP-IVON-Gradsq does the same at σ_v = 1/√(N_ess (h + δ)), and its
h₀ = 1 makes that .24 w for the paper's network. θ knows no more of the data than m does, which is released: the guarantee is
the same with it. The posterior is so wide at least.
"""

from __future__ import annotations

from typing import Any


def jitter_std(jitter: Any, scale: Any) -> Any:
    """j w."""
    return jitter * scale
