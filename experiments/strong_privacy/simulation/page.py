"""What is written: the tables and the figure of both parts."""

from __future__ import annotations

from experiments.strong_privacy.simulation import BATCH, BOUND, DELTA, DRAWS, EPOCHS, EPSILONS, SEEDS


def tables(result):
    command = "python -m experiments.strong_privacy.simulation"
    lines = [
        "# Curvature under privacy: a simulation on the digits",
        "",
        f"`{command}` · {result['seconds']:.0f} s on one thread, torch {result['torch']} · "
        f"δ = {DELTA:g}, b = {BATCH}, C = {BOUND:g}, "
        f"{EPOCHS} epochs of 1,297 digits, {SEEDS} seeds. Validation digits (200): three points of accuracy mean nothing.",
        "",
    ]
    if "truth" in result:
        lines += [
            "## Against the truth",
            "",
            "Softmax regression held at one point, 200 releases, ρ = .99, 24 repetitions. Bias, standard deviation and",
            "root mean square error in units of the mean target: v for squares, the Hessian's diagonal for Price, which is",
            "biased here because it sees clipped gradients, and the Hessian is not clipped. Rank correlations with ḡ², the",
            "diagonal Fisher of clipped gradients and the diagonal Hessian.",
        ]
        for e, (facts, rows) in result["truth"].items():
            lines += [
                "",
                f"ε = {e}: σ = {facts['noise_multiplier']:.2f}, s² = {facts['noise variance over mean v']:.3g} times the mean "
                f"v, of which "
                f"{100 * facts['share of v that is sampling']:.0f} % is sampling (F/b).",
                "",
                "| estimator | bias | bias, blank pixels | std | RMSE | RMSE to ḡ² | rank ḡ² | rank Fisher | rank Hessian |",
                "|---|---|---|---|---|---|---|---|---|",
            ]
            for name, r in rows.items():
                lines.append(
                    f"| {name} | {r['bias']:.3g} | {r['bias on blank pixels']:.3g} | {r['std']:.3g} | {r['rmse']:.3g} "
                    f"| {'–' if r['target'] != 'v' else format(r['rmse, squared mean'], '.3g')} "
                    f"| {r['rank, squared mean']:.2f} | {r['rank, Fisher']:.2f} | {r['rank, Hessian']:.2f} |"
                )
    if "training" in result:
        for name, text in (
            ("chosen", "the best of three learning rates at each ε"),
            ("single", "one learning rate for all ε, the best of three on average"),
        ):
            lines += ["", f"## Training: {text}", ""]
            for key, title in (
                ("accuracy", "Accuracy of the averaged mean"),
                ("nll", "NLL of the averaged mean"),
                ("mc_nll", f"NLL of {DRAWS} draws of the posterior"),
                ("mc_ece", "ECE of the draws (of the mean for point methods)"),
                (
                    "tempered_nll",
                    "NLL of the averaged mean after the best temperature (fitted on the same digits: an oracle)",
                ),
            ):
                if name == "single" and key not in ("accuracy", "nll", "mc_nll"):
                    continue
                lines += [f"{title}:", "", "| method | " + " | ".join(f"ε = {e:g}" for e in EPSILONS) + " |"]
                lines += ["|---" * (1 + len(EPSILONS)) + "|"]
                for label, found in result["training"].items():
                    cells = found[name]
                    shown = [
                        f"{c[k]:.3f} ± {c[f'{k}_std']:.3f}" if k in c else "–"
                        for c in (cells[f"{e:g}"] for e in EPSILONS)
                        for k in [key if key in c else ("ece" if key == "mc_ece" else key)]
                    ]
                    if any(s != "–" for s in shown):
                        lines.append(f"| {label} | " + " | ".join(shown) + " |")
                lines.append("")
            rates = ", ".join(
                f"{label} {'/'.join(format(c[name][f'{e:g}']['lr'], 'g') for e in EPSILONS)}"
                for label, c in result["training"].items()
            )
            lines += [f"Learning rates (ε = .5 to 8): {rates}."]
    return "\n".join(lines) + "\n"


def figure(result, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import matplotlib.ticker

    colours = plt.get_cmap("tab10").colors
    fig, axes = plt.subplots(2, 2, figsize=(12, 9), constrained_layout=True)
    shown = (
        "gradsq",
        "gradsq-corrected",
        "signed",
        "averaged",
        "floored",
        "empirical-bayes",
        "rank-one",
        "rank-one-shrunk",
        "cross",
    )
    for axis, key, title in (
        (axes[0, 0], "rmse", "relative error against v = ḡ² + (1−q)F/b"),
        (axes[0, 1], "rank, Fisher", "rank correlation with the diagonal Fisher"),
    ):
        for colour, name in zip(colours, shown, strict=False):
            values = [rows[name][key] for _, rows in result["truth"].values()]
            axis.plot([float(e) for e in result["truth"]], values, "o-", color=colour, label=name, lw=1.6, ms=4)
        axis.set_title(f"200 releases at one point: {title}", fontsize=10)
        if key == "rmse":
            axis.set_yscale("log")
    methods = (
        "DP-SGD",
        "DP-Adam",
        "DP-AdamBC",
        "IVON, paper",
        "IVON, empirical-bayes",
        "IVON, empirical-bayes-fisher",
        "calm, empirical-bayes-fisher",
        "calm, rank-one-shrunk-fisher",
    )
    for axis, key, title in (
        (axes[1, 0], "accuracy", "validation accuracy, averaged mean"),
        (axes[1, 1], "mc_nll", "validation NLL (of draws, where any)"),
    ):
        for i, (colour, label) in enumerate(zip(colours, methods, strict=False)):
            cells = [result["training"][label]["single"][f"{e:g}"] for e in EPSILONS]
            keys = [key if key in c else "nll" for c in cells]
            means = [c[k] for c, k in zip(cells, keys, strict=True)]
            errors = [c[f"{k}_std"] for c, k in zip(cells, keys, strict=True)]
            places = [e * 1.02 ** (i - 4) for e in EPSILONS]
            axis.errorbar(places, means, errors, fmt="o-", color=colour, label=label, lw=1.6, ms=4, capsize=2)
        axis.set_title(f"MLP, one lr for all ε, 3 seeds: {title}", fontsize=10)
    for axis in axes.flat:
        axis.set_xscale("log")
        axis.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
        axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.set_xlabel("ε (δ = 1e-4)")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, framealpha=0.7)
    fig.savefig(path, dpi=110)
