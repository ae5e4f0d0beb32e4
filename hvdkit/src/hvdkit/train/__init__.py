"""One training step, and what it computes.

step.Step               loss and update of a step, for train.py
task.Task               what a task must have; load, make_schedule
losses                  cross_entropy, require_classes
preprocessing           first layers of models: scaled, wide, Preprocess
dropout.SampleDropout   dropout that is the same on any number of ranks
gradients, reduction    from a loss to gradients that are summed over ranks
batch_norm              moving statistics brought together; SyncBatchNormalization
optimizer, sgd, lamb    update rules
schedule                learning-rate policies
ema                     averaged weights
state.State             all that a checkpoint holds
virtual, fixed_point    --virtual_ranks
task_checks             mistakes of a task as one sentence before the first step
"""
