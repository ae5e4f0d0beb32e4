"""None: by this folder hvdkit knows a project."""
