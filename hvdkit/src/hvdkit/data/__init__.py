"""Data: sources of samples, their order, augmentation and batches.

source.Source           what a data set must have: length, read, explain, fingerprint
source.Arrays           samples in memory; source.Synthetic: random ones of a given form
open.open_sources       both splits of data_dir, by --data_format
mixture.Mixture         several sources as one
classes, labels         names of classes; IGNORE and the colours of label pictures
spelling                names that look alike and are not the same
card                    what a run notes of its data; contents: SHA-256 of each file
place.Place             where a run is in its data, in samples
sampler.Sampler         which samples a rank has at a step
pipeline                TrainingFeed and EvaluationFeed: this rank's batches
shared_listing.found    a lookup that rank 0 makes for all ranks
scoped.Scoped           a value that holds inside a `with` block

readers                 formats: one file each, pictures, packed sets, remote files
augment                 crops, operations on pictures, mixing, RandAugment
prepare                 what is done to a data set before a run: `hvdkit check`, `hvdkit pack`
shipped                 digits and the demo's pictures

A fork's tasks import `augment`, image_ops, mixing, rand_augment and scenes from here: the last four
list what a task may use of the rooms inside.
"""
