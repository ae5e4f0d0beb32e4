"""Evaluation: scores over the validation set, the same on any number of ranks.

evaluator.Evaluator     runs an evaluation
metrics                 confusion_matrix, in_top, intersection_over_union, accuracy; exact sums
whole_pictures          predictions for pictures of any size: padding, windows, scales, mirror
confusion               a confusion matrix as a file, figures of each class
early_stop.given_up     whether scores have stopped improving
"""
