"""Commands that start runs and wait for them.

supervise               starts a run again until it is done; supervised_hosts: where it may start
seeds                   several seeds of one run
sweep                   searches settings; search_space: which, sweep_trials: the runs
process_tree            signals to all processes of a run
"""
