"""Readers of training data, augmentation, and the demo data set."""
