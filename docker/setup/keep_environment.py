"""A run stays in the environment that it was started in.

Python started as `.venv/bin/python` would look for every module by way of that link; once set-up
has switched it, a run would import the rest of its modules from another environment. So Python
starts itself again by its own path. Imported by keep_environment.pth before anything else is.
"""

import os
import sys

_own = os.path.realpath(sys.prefix)
_python = os.path.join(_own, "bin", os.path.basename(sys.executable or ""))
if _own != sys.prefix and os.path.isfile(_python) and os.path.samefile(_python, sys.executable):
    os.execv(_python, [_python, *sys.orig_argv[1:]])
