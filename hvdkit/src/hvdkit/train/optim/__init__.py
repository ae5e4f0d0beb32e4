"""Update rules.

optimizer               the update rule, of flags or of a task
groups                  one rule and rate for each group of weights
averages                moving averages of weights: --ema_decay
schedule                learning-rate policies, of flags or of a task
plateau                 --lr_policy=plateau
"""
