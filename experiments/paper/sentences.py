"""What the paper says: its abstract (A2), results (A, N, E) and discussion (D), in its own words; […] are ours."""

SENTENCES = {
    "A1": "DP-IVON-Gradsq is able to achieve competitive accuracy in the weak-privacy regime",
    "A2": "competitive under weak-to-moderate privacy constraints (abstract)",
    "A3": "as ε decreases, DP-IVON-Gradsq exhibits a sharper degradation than the strongest baseline",
    "A4": "… especially for smaller batch sizes",
    "A5": "Larger batch sizes generally improve robustness in the medium-privacy regime",
    "A6": "[larger batch sizes] delay the point at which accuracy collapses",
    "A7": (
        "DP-IVON-Gradsq exhibits the same qualitative dependence on batch size and clipping norm as standard "
        "DP optimizers"
    ),
    "N1": ("NLL values better than or comparable to the DP-SGD and DP-Adam baselines [in the weak-privacy regime]"),
    "N2": (
        "for smaller batch sizes, the NLL increases sharply at low ε, especially when using the larger clipping norm"
    ),
    "N3": "This degradation is stronger than what is observed for DP-SGD",
    "N4": "Larger batch sizes … improve stability across all optimizers",
    "N5": (
        "moving from batch size 128 to 512, … the NLL growth under stronger privacy constraints becomes "
        "substantially less severe"
    ),
    "E1": "DP-IVON-Gradsq appears best calibrated in the weak and medium privacy regimes",
    "E2": "as the privacy budget becomes smaller, DP-IVON-Gradsq exhibits a sharper increase in ECE",
    "E3": "… especially for C = 20 and smaller batch sizes",
    "E4": "for batch sizes 128 and 256 … DP-IVON-Gradsq becomes substantially less calibrated at low ε",
    "D1": "without introducing an additional computational cost specific to variational learning",
    "D2": ("the projected squared-gradient estimate to be zero for many coordinates [toward the end of training]"),
    "D3": (
        "when gradients become small toward the end of training, subtracting the privacy-noise variance can "
        "dominate the squared-gradient signal"
    ),
    "D4": "The running curvature estimate then mainly decays slowly through the momentum update",
    "D5": "poorly informative posterior variance estimates",
}
