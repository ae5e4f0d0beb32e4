"""Layers whose behaviour depends on the ranks, and what a run asks of a model's layers.

batch_norm              moving statistics averaged over ranks; SyncBatchNormalization
dropout                 SampleDropout, the same on any number of ranks; other draws in training
preprocessing           first layers of models: scaled, wide, Preprocess
masks                   masks of padding that a model loses
compute_types           whether layers compute in the type of --precision
saved_layers            names of this package's layers in model files
"""
