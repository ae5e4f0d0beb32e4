"""Readers: each format is one file with a `Source`; hvdkit/data/open.py picks one.

pairs.ImageLabelFolder      folders of pictures and label PNGs
pairs.PicturePairs          what readers of pictures with label PNGs have in common
voc.Voc                     Pascal VOC
cityscapes.Cityscapes       Cityscapes
class_folders.ClassFolders  a folder a class, as ImageNet
cifar.Cifar                 CIFAR-10 and CIFAR-100
idx.Idx                     MNIST, Fashion-MNIST, KMNIST
records.Records             what `hvdkit pack` writes
remote                      files of a packed set on a server
layout                      what the levels of a folder of pictures are
pictures, exif              decoding in a graph
listing                     folders and lists of names, with errors that say what is missing
"""
