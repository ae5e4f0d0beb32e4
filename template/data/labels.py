"""What a label picture's values mean, the same for every reader, the augmentation and the tasks."""

IGNORE = 255  # a pixel that neither the loss nor the metrics count
