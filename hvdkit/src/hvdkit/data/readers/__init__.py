"""Readers: each format is one file with a `Source`; hvdkit/data/open.py picks one.

folders.ImageLabelFolder    folders of pictures and label PNGs
voc.Voc                     Pascal VOC
cityscapes.Cityscapes       Cityscapes
class_folders.ClassFolders  a folder a class, as ImageNet
cifar.Cifar                 CIFAR-10 and CIFAR-100
digits.Digits               handwritten digits of 8x8 pixels
records.Records             what `hvdkit pack` writes
pairs.PicturePairs          what readers of pictures with label PNGs have in common
pictures, exif              decoding in a graph
listing                     folders and lists of names, with errors that say what is missing
"""
