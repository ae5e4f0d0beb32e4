"""Whole small runs on real ranks: what a task or a run may do wrong, and what is promised of it."""

import pytest

from ranks import CHECKS, names_of_checks, run_checks

# On 1 rank as on 2.
BOTH = ("runs", "data", "bad_steps", "saving", "evaluation", "whole_pictures", "state", "objective")
PARTS = {1: BOTH, 2: (*BOTH, "tasks", "task_models", "stragglers"), 3: ("objective",)}
# What few users have, and takes long.
RARE = {
    "check_bad_samples_are_replaced_listed_and_counted_over_a_resume",  # test_pipeline.py: alike
    "check_state_without_a_rule_is_refused_before_the_first_step",
    "check_float8_is_kerass",
    "check_rows_that_cannot_be_gathered_are_refused",
    "check_a_score_of_another_measure_counts_as_none",
    "check_terms_are_divided_by_their_own_global_counts",
    "check_what_xla_cannot_compile_is_told",
    "check_own_losses_that_mix_samples_are_refused",
    "check_a_tasks_optimizers_are_those_of_plain_keras_and_resume",
    "check_what_an_action_changes_is_in_the_checkpoint",
    "check_gathered_rows_give_the_gradient_of_the_global_loss",
    "check_terms_that_are_none_are_refused",
    "check_what_an_action_does_wrong_is_told",
    "check_what_is_kept_of_each_sample_comes_once_and_in_order",
    "check_a_kill_between_log_and_score_loses_no_evaluation",
    "check_positions_that_a_loss_leaves_out_by_shape_count_as_those_of_weight_0",
    "check_float16_that_only_skips_ends_as_diverged",
    "check_prepare_is_called_once_on_every_host",
    "check_a_rank_whose_input_is_slow_is_named_with_its_wait",
    "check_weights_of_two_types",
    "check_a_loss_of_bfloat16_is_added_up_in_float32",
    "check_a_benchmark_sums_as_the_step_does",
    "check_epochs_become_steps_once_the_data_are_counted",
    "check_a_backbone_is_read_by_rank_0_alone_and_goes_on",
    "check_the_share_that_a_crop_sees_is_said_once",
    "check_ranks_that_are_alike_are_not_named",
    "check_other_packages_are_refused_and_other_devices_told",
    "check_arrays_of_objects",
    "check_layers_compute_with_the_constants_of_restored_and_broadcast_variables",
    "check_a_picture_that_the_model_cannot_take_is_told_on_all_ranks",
    "check_a_picture_too_large_for_memory_is_told_on_all_ranks",
    "check_vocabularies_that_differ_are_refused",
    "check_small_weights_and_counts_beyond_float32_are_exact",
    "check_a_rate_is_not_suggested_from_too_few_steps",
    "check_weights_that_depend_on_outputs_are_told",
    "check_layers_have_their_names_again_once_it_has_gone_back",
}
# Those of a task are there where the task is.
FILES = {
    ranks: [f for part in parts if (f := CHECKS / f"checks_{part}.py").exists()]
    for ranks, parts in PARTS.items()
}


@pytest.fixture(scope="module")
def outcomes(request):
    """By number of ranks; a launch runs the checks that were chosen."""
    items = [item for item in request.session.items if item.fspath == request.fspath]
    of = [item.callspec.params for item in items]
    chosen = {n: [param["name"] for param in of if param["ranks"] == n] for n in PARTS}
    found, how = {}, {"timeout": 1000}
    for n, names in chosen.items():
        if names:
            found[n] = run_checks(FILES[n], n, "gloo" if n > 1 else "", names=names, **how)
    return found


# The first waits for its launch: a minute, and several on a busy machine.
@pytest.mark.timeout(3200)
@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(n, name, marks=[pytest.mark.slow] * (n != 2 or name in RARE))
        for n, files in FILES.items()
        for name in names_of_checks(*files)
    ],
)
def test_small_run(ranks, name, outcomes):
    failure = outcomes[ranks][name]
    assert failure is None, failure
