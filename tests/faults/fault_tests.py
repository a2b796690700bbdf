"""Rows of the fault table that are ordinary tests, counted: ``python tests/faults/fault_tests.py --out …/fault-tests.json``.

The others need real processes, disks and damaged files: fault_campaign.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from counted_tests import main

ROWS: dict[str, list[str]] = {
    "stop and resume at every step": [
        "durable/test_resume.py::test_stopped_and_resumed_at_every_step_nothing_differs",
        "durable/test_resume.py::test_stopped_in_the_middle_of_a_logical_batch",
        "test_stacked_checkpoint.py::test_a_restored_stack_goes_on_as_if_it_had_never_stopped",
    ],
    "resume after lost work": [
        f"durable/test_resume.py::{name}"
        for name in (
            "test_killed_at_every_step_lost_releases_are_repeated_to_the_bit_at_no_cost",
            "test_a_step_that_does_not_repeat_is_dropped_and_all_is_new_from_there",
            "test_secure_noise_is_always_new_and_what_was_lost_stays_charged",
            "test_on_a_device_nothing_is_repeated",
            "test_without_a_checkpoint_all_is_charged_and_nothing_is_drawn_again",
            "test_an_old_checkpoint_never_takes_releases_back",
        )
    ]
    + [
        "test_stacked_checkpoint.py::test_what_was_lost_is_repeated_to_the_bit_and_charged_once",
        "test_stacked_checkpoint.py::test_a_lost_step_that_comes_out_differently_gets_new_noise_and_a_new_batch",
        "test_stacked_checkpoint.py::"
        "test_where_blocks_are_written_ahead_they_stay_charged_unless_it_stops_in_good_order",
    ],
    "same seed in both processes": [
        "durable/test_resume.py::test_the_same_noise_never_meets_two_sums",
        "privacy/test_randomness.py::test_a_refresh_is_new_whatever_seed_was_set",
    ],
    "truncated or bit-flipped checkpoint": [
        "durable/test_resume.py::test_damaged_checkpoints_are_named_and_the_one_before_is_used",
        "durable/test_ledger.py::test_every_changed_bit_is_found_or_counted_upwards",
        "durable/test_ledger.py::test_a_torn_last_line_is_counted_as_the_largest_block",
    ],
    "NaN or Inf example": [
        "privacy/test_bookkeeping.py::test_a_non_finite_example_contributes_zero",
        "privacy/test_pitfalls_numbers.py::test_a_bad_record_contributes_zero_and_the_update_is_that_of_the_data_without_it",
        "methods/test_contract.py::test_an_example_that_is_not_finite_counts_for_nothing",
        "test_fit.py::test_a_label_that_is_no_class_counts_for_nothing_and_raises_nothing",
    ],
    "out of memory on a micro-batch": ["faults/test_retry.py"],
    "exception inside sampled_params": [
        "privacy/test_pitfalls_theta.py::test_an_exception_inside_sampled_params_restores_the_mean",
        "optim/test_ivon_sampling.py::test_weights_are_restored_exactly_whatever_happens_inside",
    ],
    "data file short or flipped": [
        "data/test_cifar10.py::test_one_wrong_byte_is_refused",
        "data/test_fashion_mnist.py::test_damage_is_refused_with_words",
    ],
    "a sweep killed": [
        "study/test_run.py::test_killed_for_good_on_a_bare_machine_and_resumed",
        "study/test_run.py::test_killed_while_finishing_nothing_stands_twice",
        "study/test_run.py::test_a_crash_anywhere_changes_nothing",
    ],
    "a sweep's evaluation killed or repeated": [
        f"study/test_evaluation_kills.py::{name}"
        for name in (
            "test_a_kill_changes_no_row_no_account_and_no_answer",
            "test_killed_again_and_again",
            "test_other_sums_get_other_noise_and_are_charged_again",
            "test_questions_that_nobody_remembers_are_charged_again",
            "test_who_was_given_up_leaves_the_questions_of_a_newer_attempt_alone",
            "test_a_row_of_an_earlier_training_is_made_again",
        )
    ]
    + [
        "study/test_ray.py::test_rows_that_a_killed_worker_has_delivered_are_not_made_again",
        "study/test_merge.py::test_a_stack_that_is_evaluated_again_takes_no_cost_back",
    ],
    "a sweep's worker killed or hung": [
        "study/test_ray.py::test_a_killed_worker_changes_nothing_where_the_folder_is_seen",
        "study/test_ray.py::test_what_was_lost_with_a_worker_of_its_own_disk_stays_charged",
        "study/test_ray.py::test_a_worker_that_hangs_is_ended_and_its_stack_begun_again",
        "study/test_ray.py::test_a_run_that_fails_is_tried_again_then_named_and_the_others_finish",
    ],
    "a rank killed or hung": [
        "distributed/test_recovery.py::test_a_rank_is_killed_in_a_step",
        "distributed/test_recovery.py::test_after_a_crash_on_other_ranks_what_was_lost_stays_charged",
        "distributed/test_recovery.py::test_a_rank_that_hangs_is_given_up_at_the_time_limit_of_the_group",
        "distributed/test_recovery.py::test_if_the_charge_cannot_be_written_no_rank_learns_anything",
    ],
    "two processes": [
        "durable/test_ledger.py::test_a_second_process_is_refused",
        "study/test_run.py::test_two_processes_never_run_one_study",
    ],
    "SIGTERM or Ctrl-C of a study": ["study/test_run.py::test_an_interrupt_stops_at_a_block_and_costs_nothing"],
    "a pickle with code in it": [
        "durable/test_published.py::test_a_pickle_in_the_place_of_a_checkpoint_is_not_executed",
        "privacy/test_pitfalls_copies.py::test_a_checkpoint_with_code_in_it_is_refused_and_not_executed",
    ],
    "a checkpoint is a secret, an export is not": [
        "durable/test_resume.py::test_checkpoints_are_secret_and_hold_no_raw_gradient",
        "durable/test_published.py::test_an_export_has_the_model_and_nothing_that_draws",
        "test_stacked_checkpoint.py::test_seeds_are_not_written_and_the_file_is_secret",
    ],
}


if __name__ == "__main__":
    sys.exit(main(ROWS, "python tests/faults/fault_tests.py", "one a test case, in all its parameters"))
