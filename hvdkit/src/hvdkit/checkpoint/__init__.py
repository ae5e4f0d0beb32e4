"""Checkpoints, and other weights to start from.

checkpoints.Checkpoints     those of a run: saved, scored, found, restored
saver.Saver                 writes them while training goes on
files, writing              format on disk; written whole or not at all
run_folder                  one run in one folder; older results are set aside
warm_start                  --init_from, --backbone_weights
"""
