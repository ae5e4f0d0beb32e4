"""Evaluation: scores over the validation set, the same on any number of ranks.

evaluator.Evaluator     runs an evaluation
metrics                 confusion matrix (counts, file, figures of each class), top k; exact sums
whole_pictures          predictions for pictures of any size: padding, windows, scales, mirror
"""
