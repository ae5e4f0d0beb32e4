"""One file a format: each class is a Source (hvdkit/data/source.py); hvdkit/data/open.py picks one."""
