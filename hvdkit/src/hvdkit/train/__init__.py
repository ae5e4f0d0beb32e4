"""One training step, and what it computes.

step.Step               loss and update of a step, for train.py
tracing                 a step while its function is traced; the direct call of its graph
trial                   a step tried on few samples, on ranks that are simulated
task.Task               what a task must have; load_task, optional
objective, across       terms of a loss; rows of the whole global batch
losses                  cross_entropy, require_classes; losses that a model adds by itself
outputs                 what outputs mean: softmax, one_logit, sigmoid
preprocessing           first layers of models: scaled, wide, Preprocess
dropout                 SampleDropout, the same on any number of ranks; other draws in training
gradients, reduction    from a loss to gradients that are summed over ranks
updating                one update, or none
batch_norm              moving statistics averaged over ranks; SyncBatchNormalization
combine                 other state that forward passes change, combined over ranks by rules
optimizer, groups       update rules; one for each group of weights
schedule                learning-rate policies, of flags or of a task
state                   State, all that a checkpoint holds, by name; averaged weights
saved_layers            names of this package's layers in model files
virtual, fixed_point    --virtual_ranks
task_checks             mistakes of a task as one sentence before the first step
graph_checks            the same, found in traced graphs
"""
