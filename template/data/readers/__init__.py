"""One file a format: each class is a Source (data/source.py); data/open.py picks one."""
