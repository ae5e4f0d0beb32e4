"""One training step, and what it computes.

step        the step itself: loss, gradients, their sum over ranks, update, state
virtual     --virtual_ranks: the same step as shares of a global batch, summed exactly
optim       update rules, groups of weights, learning rate, averaged weights
layers      batch norm, dropout and preprocessing, and what a run asks of a model's layers
task        what a task must have, its mistakes, the meaning of its model's inputs and outputs
trial       a step tried on few samples before the first one, on ranks that are simulated

A fork imports `task` and the modules beside this file. They list what a task may use of the rooms
inside, whose modules may move: losses, across, outputs, groups, batch_norm, dropout, preprocessing.
"""
