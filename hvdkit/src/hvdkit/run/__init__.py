"""A run: prepare, begin, loop, finish.

loop.Run            what train.py uses
main.main           from the command line to the exit code
context             RunContext: task, data, model, optimizer, state; where a run begins
parts               RunParts: feeds, step, saver, health and what else a run is built of
actions             what happens after a step: sync, log, save, evaluate
modes               --dry_run, --find_lr, --benchmark as other lists of actions
health              votes and verdicts: skipped steps, stop signals
load_run            a trained run, for commands
"""
