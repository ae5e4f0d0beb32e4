"""Data: sources of samples, their order, augmentation and batches.

source.Source           what a data set must have: length, read, explain, fingerprint
source.Arrays           samples in memory; source.Synthetic: random ones of a given form
open.open_sources       both splits of data_dir, by --data_format
readers                 one file a format
shared_listing.found    a lookup that rank 0 makes for all ranks
labels.IGNORE           the label of pixels that are left out; labels.COLOURS: of classes
place.Place             where a run is in its data, in samples
sampler.Sampler         which samples a rank has at a step
pipeline                TrainingFeed and EvaluationFeed: this rank's batches
augment                 random crops of pictures, with label pictures or with one class
check, pack             `hvdkit check`, `hvdkit pack`
scenes                  the demo's data set, made from the pictures in shipped
"""
