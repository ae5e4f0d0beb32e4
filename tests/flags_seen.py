"""Of each flag that changes no weights of Small: a test that sees what it does.

flag_values.CHANGES has the others. `make breaks ARGS=--flags` tries each: with its flag ignored the
test must fail.
"""

from __future__ import annotations

# By file of tests, or by number of ranks and module of template/tests with checks: name of the
# test, or check, without its first word; flags.
_BY_FILE: dict[str, dict[str, list[str]]] = {
    "template/tests/test_tasks.py": {
        "a_name_without_a_task_gets_the_list_of_those_there_are": ["task"],
    },
    "template/tests/test_classification.py": {
        "wrong_model_is_named": ["model"],
        "the_smallest_crop_is_the_flags_or_as_usual_by_size": ["image_size", "crop_area"],
    },
    "template/tests/test_readers_open.py": {
        "formats_have_their_readers": ["data_dir", "data_format"],
        "splits_of_any_name": ["train_split", "val_split"],
    },
    "template/tests/test_telemetry.py": {
        "speed_is_of_the_steps_since_the_last_line_without_evaluation": ["run_dir"],
    },
    "template/tests/test_segmentation_augmentation.py": {
        "dropout_smoothing_and_classes_are_those_of_the_flags": ["num_classes"],
        "flags_have_the_last_word": ["mirror", "scale_range", "synthetic_data"],
    },
    "2 checks_runs": {
        "a_benchmark_tells_where_the_time_goes": ["benchmark"],
    },
    "2 checks_bad_steps": {
        "a_dry_run_ends_where_a_run_goes_back": ["dry_run"],
        "bad_steps_in_a_row_send_the_run_back_and_leave_out_their_batches": ["max_bad_steps"],
        "layers_have_their_names_again_once_it_has_gone_back": ["resume"],
    },
    "template/tests/test_find_lr.py": {
        "any_number_of_ranks_suggests_the_same": ["find_lr"],
    },
    "template/tests/test_config.py": {
        "batch_per_rank_becomes_the_global_batch_size": ["batch_per_rank"],
    },
    "tests/test_flags.py": {
        "flags": ["eval_batch_size", "log_gradients", "log_every", "keep"],
    },
    "template/tests/test_optimizer.py": {
        "weights_and_averages_follow_the_formula": ["ema_decay"],
    },
    "2 checks_whole_pictures": {
        "the_share_that_a_crop_sees_is_said_once": ["eval_crop"],
        "scores_are_those_of_plain_numpy": ["eval_window", "eval_scales", "eval_flip"],
    },
    "template/tests/test_actions.py": {
        "moving_statistics_are_brought_together_as_often_as_asked": [
            "bn_sync_every",
            "deterministic",
        ],
        "an_evaluation_comes_every_so_often_and_at_the_end": ["eval_every"],
        "a_checkpoint_comes_as_often_as_asked_and_with_each_evaluation": ["checkpoint_every"],
    },
    "template/tests/test_reduction.py": {
        "a_backend_that_was_not_started_is_an_error": ["reduce_backend"],
        "merge_groups": ["gradient_groups"],
        "how_long_ranks_wait_for_one_that_hangs": ["stall_shutdown_s"],
    },
    "3 checks_reduction": {
        "packs_hold_small_gradients_only_and_no_more_than_asked": ["pack_bytes", "pack_count"],
    },
    "template/tests/test_threads.py": {
        "a_gpu_that_is_not_there_is_refused": ["device"],
        "threads_are_the_flags_or_a_share_of_the_cores": ["cpu_threads"],
        "readers_are_the_flags_or_a_share_of_the_cores": ["data_workers"],
    },
    "template/tests/test_trackers.py": {
        "a_tracker_of_ones_own_gets_what_is_logged": ["trackers"],
    },
    "2 checks_saving": {
        "a_checkpoint_by_the_clock_is_of_the_same_step_on_all_ranks": ["checkpoint_minutes"],
        "too_many_saves_that_fail_in_a_row_end_the_run_and_a_rerun_goes_on": ["max_failed_saves"],
        "a_bit_that_flips_on_one_rank_is_found_and_named": ["drift_every"],
        "what_drifted_is_repaired_by_rank_0s": ["drift"],
    },
    "2 checks_task_models": {
        "a_backbone_is_read_by_rank_0_alone_and_goes_on": [
            "backbone_weights",
            "backbone_preprocessing",
        ],
    },
    "2 checks_evaluation": {
        "a_score_of_another_measure_counts_as_none": ["early_stop_evals"],
    },
    "template/tests/test_warm_start.py": {
        "real_runs": ["init_skip_mismatched"],
    },
}

# By flag: an id of pytest, or "RANKS module.check_name".
SEEN: dict[str, str] = {
    flag: f"{file}::test_{name}" if file.endswith(".py") else f"{file}.check_{name}"
    for file, tests in _BY_FILE.items()
    for name, flags in tests.items()
    for flag in flags
}
