"""Bugs sown on purpose, each weakening the guarantee or the stated behaviour: what is wrong, and which check should see it."""

from __future__ import annotations

import torch
from account_bugs import (
    charged_as,
    charged_every_other,
    charged_late,
    not_charged,
    roundings_dropped,
    too_small_epsilon,
)
from autocast_bugs import gradients_made_in_autocast, mean_undone_in_bf16, summed_in_autocast
from boundary_bugs import posterior_reads_data, raw_gradient
from clipping_bugs import (
    biases_left_out,
    clip_the_batch,
    clip_the_share_of_the_mean,
    clipped_apart,
    counted_twice,
    cross_terms_dropped,
    no_clipping,
    norms_without,
    not_finite,
    old_bound,
    one_copy_for_all_examples,
    rounded,
    rounded_norms,
    rows_of_a_table_rounded_apart,
    stale_parts,
    stale_sum,
    summed_by_another_product,
    sums,
    theta_samples_clipped_apart,
)
from draw_bugs import (
    copies_draw_alike,
    forks_go_on_alike,
    noise_by_the_state_alone,
    noise_of_24_bits,
    theta_for_every_batch,
)
from noise_bugs import (
    divided_by_the_drawn_batch,
    drawn,
    langevin_noise_instead,
    noise_before_clipping,
    noise_for_every_part,
    noise_of_another_run,
    noise_of_theta,
    noise_scaled,
    one_tensor_for_all_parameters,
    same_noise_every_step,
    shared_seed,
    sigma_not_heard,
    wrong_variance,
)
from people_bugs import n_counts_rows, people_cut_in_two, rows_added_up, rows_clipped_apart, rows_drawn
from program_bugs import (
    generator_kept,
    generator_stands_still,
    journal_not_asked,
    last_batch_stays_seated,
    program_of_the_old_bound,
    spare_places_count,
    spare_rows_count,
    theta_of_the_last_step,
    update_told_another_variance,
)
from rank_bugs import (
    all_of_the_batch_on_every_rank,
    averaged_over_ranks,
    clipped_after_reduction,
    empty_part_skipped,
    every_rank_adds_noise,
    other_ranks_do_not_charge,
    other_ranks_lost,
    ranks_noise_apart,
    ranks_share_their_noise,
    reduced_in_bf16,
    theta_of_each_rank,
)
from sampling_bugs import (
    at_twice_the_rate,
    batches,
    empty_skipped,
    fixed_size,
    in_pairs,
    shuffled,
    the_same_every_step,
    truncated,
    with_replacement,
)
from sowing import Mutant
from view_bugs import views_added_up, views_clipped_apart


def mutants() -> list[Mutant]:
    width, definition, moves = "gaussian of the stated width", "definition", "one example moves"
    first_once, poisson, cancels = "charged first", "poisson samples", "that cancels"
    another_product, table_rows = summed_by_another_product(), rows_of_a_table_rounded_apart()
    return [
        Mutant("no noise", "nothing is added to the sum", width, noise_scaled(lambda s: 0.0)),
        Mutant("half the noise", "σ/2 is added where σ is charged", width, noise_scaled(lambda s: 0.5)),
        Mutant(
            "noise divided by the batch",
            "std σC/b on the sum",
            width,
            noise_scaled(lambda s: 1 / s.expected_batch_size),
        ),
        Mutant(
            "noise too small by 1.25",
            "what the canaries must notice",
            "canaries in single",
            noise_scaled(lambda s: 0.8),
        ),
        Mutant(
            "noise not Gaussian",
            "uniform, of the right variance",
            width,
            drawn(lambda z: torch.erf(z / 2**0.5) * 3**0.5),
        ),
        Mutant("noise with its tails cut", "|z| ≤ 2 only", width, drawn(lambda z: z.clamp(-2, 2))),
        Mutant(
            "noise reused across steps",
            "two releases subtract to the data",
            "across coordinates",
            same_noise_every_step(),
        ),
        Mutant(
            "noise reused across parameters",
            "one tensor for all",
            "across coordinates",
            one_tensor_for_all_parameters(),
        ),
        Mutant("noise before clipping", "examples are noised, the sum is not", width, noise_before_clipping()),
        Mutant(
            "Langevin noise counted as privacy noise",
            "parameters are noised, not the release",
            width,
            langevin_noise_instead(),
        ),
        Mutant("privacy noise is θ's noise", "one draw for both", "posterior noise", noise_of_theta()),
        Mutant("runs share a seed", "two runs subtract to the data", "two runs", shared_seed()),
        Mutant("σ of another run of the stack", "the first run's for all", "two runs", noise_of_another_run()),
        Mutant(
            "noise for every part of a batch", "several noisy parts, one charge", "in parts", noise_for_every_part()
        ),
        Mutant(
            "correction without the divisor",
            "told (σC)², not (σC/b)²",
            "sigma c over b",
            wrong_variance(lambda s: s.noise_std**2),
        ),
        Mutant("correction of nothing", "told that there is no noise", "sigma c over b", wrong_variance(lambda s: 0.0)),
        Mutant("divided by the drawn batch", "its size is private", definition, divided_by_the_drawn_batch()),
        Mutant("no clipping", "every factor is 1", moves, no_clipping()),
        Mutant("clipping of the batch, not of examples", "‖Σg‖ ≤ C", definition, clip_the_batch()),
        Mutant("clipping of the share of the mean", "C on g/b: b·C in the sum", moves, clip_the_share_of_the_mean()),
        Mutant(
            "C for every tensor", "√L·C in all", moves, clipped_apart(lambda n: [slice(i, i + 1) for i in range(n)])
        ),
        Mutant(
            "two halves clipped apart",
            "as a variational mean and its variance: √2·C",
            moves,
            clipped_apart(lambda n: [slice(0, n // 2), slice(n // 2, n)] if n > 1 else [slice(0, n)]),
        ),
        Mutant(
            "norm over a part of the parameters",
            "the last layer is left out",
            moves,
            norms_without(lambda n: [n - 2, n - 1]),
        ),
        Mutant("biases left out of the norm", "every second tensor", moves, biases_left_out()),
        Mutant("a bad example is kept", "NaN and Inf enter the sum", moves, not_finite()),
        Mutant("an example counted twice", "2C", moves, counted_twice()),
        Mutant("stale gradients", "the last batch is in the next sum", definition, stale_sum()),
        Mutant("a stale part after an exception", "an abandoned batch is in the next sum", "was left", stale_parts()),
        Mutant(
            "cross terms of shared weights dropped", "norms of the uses, not of their sum", moves, cross_terms_dropped()
        ),
        Mutant(
            "sums by another product than norms", "rounded apart where a gradient cancels", cancels, another_product
        ),
        Mutant("rows of a table rounded apart", "what is added up was not measured", cancels, table_rows),
        Mutant("one copy for all examples", "of a layer without a rule", definition, one_copy_for_all_examples()),
        Mutant("θ-samples clipped apart", "K·C under one charge", "samples of theta", theta_samples_clipped_apart()),
        Mutant(
            "a scheduler's C not heard by clipping", "noise for the new, sums of the old", "changed bound", old_bound()
        ),
        Mutant("a scheduler's σ not heard by the noise", "the new is charged", "changed sigma", sigma_not_heard()),
        Mutant("sums in bf16", "rounded by more than an example", "coherent", sums(lambda call, args: rounded(call()))),
        Mutant("norms in bf16", "too small by up to 0.4 %", moves, rounded_norms()),
        Mutant("compiled roundings dropped", "norms of other numbers than are summed", "coherent", roundings_dropped()),
        Mutant("raw gradient in momentum", "past the boundary", "frozen", raw_gradient("momentum")),
        Mutant("raw gradient in curvature", "past the boundary", "frozen", raw_gradient("curvature")),
        Mutant("posterior that reads data", "its width depends on the sums", "frozen", posterior_reads_data()),
        Mutant("shuffled batches, the last dropped", "accounted as Poisson", poisson, batches(shuffled)),
        Mutant("batches of fixed size", "accounted as Poisson", poisson, batches(fixed_size)),
        Mutant("batches with replacement", "accounted as Poisson", poisson, batches(with_replacement)),
        Mutant("sampling at 2q", "q is charged", poisson, batches(at_twice_the_rate)),
        Mutant("the same batch every step", "as a captured graph might", poisson, batches(the_same_every_step)),
        Mutant("examples drawn in pairs", "not independently", poisson, batches(in_pairs)),
        Mutant("an empty batch skipped", "its absence is seen", first_once, empty_skipped()),
        Mutant("an overflowing batch truncated", "what does not fit is lost", "in parts", truncated()),
        Mutant("charged after the release", "a crash hides a release", first_once, charged_late()),
        Mutant("not charged", "ε stays 0", first_once, not_charged()),
        Mutant("charged every other time", "half of ε", first_once, charged_every_other()),
        Mutant("charged at q/2", "wrong q", first_once, charged_as(sample_rate=lambda q: q / 2)),
        Mutant("charged at 2σ", "wrong σ", first_once, charged_as(noise_multiplier=lambda s: 2 * s)),
        Mutant("an accountant that halves ε", "the claim is wrong", "account is no less", too_small_epsilon()),
        Mutant("noise of every rank", "W times as much variance", "sigma c over b", every_rank_adds_noise()),
        Mutant("ranks add the same noise", "shares of it from one seed", width, ranks_share_their_noise()),
        Mutant("every rank noises the sum itself", "W releases, one charge", definition, ranks_noise_apart()),
        Mutant("averaged over ranks", "as ordinary gradients are", definition, averaged_over_ranks()),
        Mutant("other ranks' sums lost", "only the first one's is released", definition, other_ranks_lost()),
        Mutant("ranks add up in bf16", "rounded by more than an example", "coherent", reduced_in_bf16()),
        Mutant("a rank's sum clipped", "not its examples", definition, clipped_after_reduction("rank")),
        Mutant("clipped after the reduction", "the sum, not its examples", definition, clipped_after_reduction("all")),
        Mutant("a θ for every rank", "no gradient of one objective", definition, theta_of_each_rank()),
        Mutant("all of the batch on every rank", "every example W times", poisson, all_of_the_batch_on_every_rank()),
        Mutant("a rank skips its empty part", "its absence is seen, or awaited", first_once, empty_part_skipped()),
        *_of_views(definition=definition, moves=moves),
        *_of_people(definition=definition, moves=moves, poisson=poisson, first_once=first_once),
        Mutant(
            "only the first rank charges", "ε as another rank states it is 0", first_once, other_ranks_do_not_charge()
        ),
        *_of_autocast(moves),
        *_of_draws(),
        *_of_programs(definition=definition),
    ]


def _of_programs(definition: str) -> list[Mutant]:
    people, moved, seat = {"rows_per_user": 3}, generator_stands_still(), last_batch_stays_seated()
    told, journal = update_told_another_variance(), journal_not_asked()
    return [
        Mutant("a spare place counts", "the loss of no example", definition, spare_places_count()),
        Mutant("spare rows of a person count", "as if they were the person's", definition, spare_rows_count(), people),
        Mutant("the last batch stays seated", "what a smaller one leaves of it", definition, seat),
        Mutant("a replay begins where the last one did", "the same noise again", "across coordinates", moved),
        Mutant(
            "gradients at the θ of the last step", "the release is of another", definition, theta_of_the_last_step()
        ),
        Mutant("a program of the old C", "noise for the new one", "changed bound", program_of_the_old_bound()),
        Mutant("a program keeps its generator", "a fork has it too", "a fork draws", generator_kept()),
        Mutant("a program asks no journal", "noise by the state alone", "go on apart", journal),
        Mutant("a captured update told another variance", "than is released", "sigma c over b", told),
    ]


def _of_draws() -> list[Mutant]:
    copied, resumed = "a copy draws", "go on apart"
    return [
        Mutant("a fork goes on alike", "parent and child add the same noise", "a fork draws", forks_go_on_alike()),
        Mutant("a copied loader draws the same", "one batch, two releases", copied, copies_draw_alike()),
        Mutant("a resumed copy's noise on another sum", "they subtract", resumed, noise_by_the_state_alone()),
        Mutant(
            "θ for every batch of a temperature", "everyone's share moves", "of one function", theta_for_every_batch()
        ),
        Mutant("noise of 24 bits", "its low bits tell the sum", "finer", noise_of_24_bits()),
    ]


def _of_autocast(moves: str) -> list[Mutant]:
    made, summed = gradients_made_in_autocast(), summed_in_autocast()
    return [
        Mutant(
            "gradients made in autocast", "norms in bf16 of what is summed in fp32", moves, made, {"autocast": True}
        ),
        Mutant("summed in autocast", "rounded to bf16 after the norm", moves, summed, {"autocast": True}),
        Mutant(
            "a mean undone in bf16",
            "the batch's size rounds everyone",
            "coherent",
            mean_undone_in_bf16(),
            {"autocast": True},
        ),
    ]


def _of_views(definition: str, moves: str) -> list[Mutant]:
    views = {"views": 3}
    return [
        Mutant("views clipped apart", "K·C under one charge", moves, views_clipped_apart(), views),
        Mutant("views added up, not averaged", "another gradient", definition, views_added_up(), views),
    ]


def _of_people(definition: str, moves: str, poisson: str, first_once: str) -> list[Mutant]:
    people = {"rows_per_user": 3}
    return [
        Mutant("rows of a person clipped apart", "as many times C as rows", moves, rows_clipped_apart(), people),
        Mutant("rows of a person added up", "where the mean is stated", definition, rows_added_up(), people),
        Mutant("rows drawn, not people", "who has many is there more often", poisson, rows_drawn(), people),
        Mutant("N counts rows", "q is charged too small", first_once, n_counts_rows(), people),
        Mutant("a person cut in two", "by micro-batches: 2C", "in parts", people_cut_in_two(), people),
    ]
