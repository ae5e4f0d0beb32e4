"""Data: sources of samples, their order, augmentation and batches.

source.Source           what a data set must have: length, read, explain, fingerprint
arrays.Arrays           samples in memory
synthetic.Synthetic     random samples of a given form
open.open_sources       both splits of data_dir, by --data_format
readers                 one file a format
shared_listing.found    a lookup that rank 0 makes for all ranks
labels.IGNORE           the label of pixels that are left out
sampler.Sampler         which samples a rank has at a step
pipeline                TrainingFeed and EvaluationFeed: this rank's batches
augment                 random crops of pictures with label pictures
crops                   random crops of pictures with one class
palette.COLOURS         colours of classes
check, pack             `hvdkit check`, `hvdkit pack`
demo.scenes             the demo's data set
"""
