"""How many bad inputs were tried and refused: ``python tests/count_bad_input.py --out tests/reliability/bad-input.json``.

``ROWS`` is the list of what must be refused, each row with the tests that show it; a row without a test that ran is an error.
"""

from __future__ import annotations

import sys

from counted_tests import main

ENGINE = "privacy/test_bad_input.py"
ACCOUNT = "privacy/accounting/test_accounting_bad_input.py"
CALIBRATION = "privacy/accounting/test_accounting_calibration.py"
LOSSES = "privacy/test_losses.py"
EVERYWHERE = "test_bad_input_everywhere.py"
PITFALLS = "privacy/test_pitfalls"
RESUME = "durable/test_resume.py"
FILES = (ENGINE, ACCOUNT, LOSSES, EVERYWHERE)

_CALL = f"{ENGINE}::test_a_bad_argument_of_make_private_is_named_and_changes_nothing"
_BUDGET = f"{ENGINE}::test_a_bad_argument_of_make_private_with_epsilon_is_named_and_changes_nothing"
_MODEL = f"{ENGINE}::test_a_model_that_cannot_be_trained_privately_is_refused"
_DATA = f"{ENGINE}::test_data_that_cannot_be_sampled_independently_are_refused"
_IVON = f"{EVERYWHERE}::test_ivon"

#: What must be refused, and by which tests that is seen: ``file::test`` with all its cases, or those that begin so.
ROWS: dict[str, tuple[str, ...]] = {
    "δ ≤ 0, ≥ 1, NaN": (f"{ENGINE}::test_a_bad_delta_is_refused", f"{ACCOUNT}::test_delta", f"{_BUDGET}[δ"),
    "δ ≥ 1/N: a warning": (f"{ENGINE}::test_a_delta_that_allows_publishing_an_example_is_warned_of",),
    "target ε ≤ 0": (f"{_BUDGET}[ε", f"{ACCOUNT}::test_target_epsilon"),
    "target ε unreachable": (f"{CALIBRATION}::test_an_unreachable_target_names_the_smallest_one",),
    "σ < 0, NaN, inf": (f"{_CALL}[σ", f"{ACCOUNT}::test_noise_multiplier"),
    "σ = 0: runs, recorded as non-private, a warning": (
        f"{PITFALLS}_settings.py::test_training_without_a_guarantee_says_so_and_costs_infinity",
        f"{PITFALLS}_settings.py::test_one_noiseless_release_among_private_ones_costs_infinity",
    ),
    "q outside (0, 1]": (
        f"{ACCOUNT}::test_sample_rate",
        f"{ENGINE}::test_a_release_cannot_be_described_wrongly[sample_rate",
    ),
    "steps negative or fractional": (f"{ACCOUNT}::test_steps", f"{ACCOUNT}::test_budget_steps"),
    "RDP order ≤ 1": (f"{ACCOUNT}::test_orders", f"{ACCOUNT}::test_sets_of_orders"),
    "unknown accountant": (f"{ENGINE}::test_an_unknown_accountant_is_refused", f"{ACCOUNT}::test_accountant"),
    "ε and σ both given": (f"{_BUDGET}[ε and σ", f"{EVERYWHERE}::test_fit[options8"),
    "GDP-CLT asked as a guarantee": (f"{ACCOUNT}::test_gdp_is_refused_in_its_own_words",),
    "C ≤ 0, inf, NaN": (f"{_CALL}[C", f"{_BUDGET}[C"),
    "BatchNorm": (f"{_MODEL}[hooks-with_batch_norm", f"{_MODEL}[bookkeeping-with_batch_norm"),
    "buffers updated in forward": (
        f"{PITFALLS}_boundary.py::test_a_buffer_written_in_forward_is_refused",
        f"{PITFALLS}_boundary.py::test_a_buffer_written_in_an_earlier_forward_or_without_gradients_is_refused",
    ),
    "no trainable parameters": (f"{_MODEL}[hooks-frozen", f"{_MODEL}[bookkeeping-frozen"),
    "optimizer parameter not in the model, and the reverse": (
        f"{ENGINE}::test_the_optimizer_must_have_the_models_parameters_and_all_of_them",
    ),
    "a layer without a per-example rule": (f"{_MODEL}[hooks-with_a_layer", f"{_MODEL}[bookkeeping-with_a_layer"),
    "parameters on mixed devices": (f"{_MODEL}[hooks-on_two_devices", f"{_MODEL}[bookkeeping-on_two_devices"),
    "fp16 accumulation": (f"{PITFALLS}_numbers.py::test_half_precision_parameters_are_refused",),
    "wrapping twice": (f"{ENGINE}::test_wrapping_twice_is_refused",),
    "unknown keyword argument": (
        f"{PITFALLS}_settings.py::test_a_misspelt_keyword_is_a_type_error",
        f"{EVERYWHERE}::test_methods[option unknown",
    ),
    "scalar loss where per-example is required": (
        f"{LOSSES}::test_a_scalar_loss_in_fit_is_refused",
        f"{LOSSES}::test_what_is_no_loss_an_example_is_refused",
    ),
    "reduction mismatch": (
        f"{LOSSES}::test_a_criterion_that_is_no_plain_mean_is_refused_and_nothing_was_changed",
        f"{_CALL}[reduction unknown",
    ),
    "a mean that divides by the weights of the batch": (
        f"{LOSSES}::test_a_weighted_mean_is_refused_in_backward_though_never_handed_over",
        f"{LOSSES}::test_a_criterion_that_is_no_plain_mean_is_refused_and_nothing_was_changed",
        f"{LOSSES}::test_a_torch_in_which_losses_cannot_be_inspected_is_refused_before_anything_is_made",
    ),
    "non-Poisson, weighted and subset samplers": (_DATA,),
    "drop_last, weighted: run only as recorded non-private": (
        f"{ENGINE}::test_another_sampler_runs_only_as_recorded_non_private",
    ),
    "expected batch > N": (f"{_CALL}[batch above N", f"{_BUDGET}[batch above N"),
    "empty dataset, iterable dataset without length": (_DATA,),
    "NaN inputs, labels out of range or of the wrong dtype: the pre-flight": (f"{EVERYWHERE}::test_preflight",),
    "the same after step 0: contributes zero, raises nothing": (
        f"{PITFALLS}_numbers.py::test_a_bad_record_contributes_zero_and_the_update_is_that_of_the_data_without_it",
        "privacy/test_bookkeeping.py::test_a_non_finite_example_contributes_zero",
        "test_fit.py::test_a_label_that_is_no_class_counts_for_nothing_and_raises_nothing",
    ),
    "ess ≤ 0, hess_init ≤ 0, β outside [0, 1], mc_samples < 1": (_IVON,),
    "step() without a gradient": (f"{ENGINE}::test_step_without_a_gradient_is_refused",),
    "upstream IVON under the engine": (f"{ENGINE}::test_upstream_ivon_is_refused",),
    "resume with another config, dataset or method": (
        f"{RESUME}::test_resuming_something_else_is_refused",
        "test_stacked_checkpoint.py::test_a_checkpoint_of_something_else_is_refused",
    ),
    "missing, corrupt or pickle file": (
        "durable/test_published.py::test_a_pickle_in_the_place_of_a_checkpoint_is_not_executed",
        f"{PITFALLS}_copies.py::test_a_checkpoint_with_code_in_it_is_refused_and_not_executed",
        "durable/test_ledger.py::test_an_edited_sigma_is_found_and_the_line_named",
        f"{RESUME}::test_damaged_checkpoints_are_named_and_the_one_before_is_used",
        f"{EVERYWHERE}::test_posteriors_and_predictions",
    ),
    "output directory exists": ("durable/test_published.py::test_an_export_has_the_model_and_nothing_that_draws",),
    "budget exhausted": (
        "privacy/test_tier_b.py::test_the_budget_stops_the_step_that_would_pass_it_and_not_one_before",
        "durable/test_ledger.py::test_a_target_goes_on_from_its_ledger_and_stops_where_it_would_have",
    ),
    "a generator that is none, or beside secure_mode": (
        "privacy/test_randomness.py::test_bad_generators",
        f"{ENGINE}::test_a_noise_generator_contradicts_secure_mode",
    ),
}


WHAT = "one a test case: a bad input refused in one sentence with nothing changed, or its good neighbour accepted"

if __name__ == "__main__":
    sys.exit(main(ROWS, "python tests/count_bad_input.py", WHAT, whole=FILES))
