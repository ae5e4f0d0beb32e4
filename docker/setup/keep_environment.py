"""Imported first: Python that was started through the link .venv restarts itself by its real path,
so that it finds its modules after set-up has switched the link."""

import os
import sys

_own = os.path.realpath(sys.prefix)
_python = os.path.join(_own, "bin", os.path.basename(sys.executable or ""))
if (
    _own != sys.prefix
    and os.path.isfile(_python)
    and os.path.samefile(_python, sys.executable)
):
    os.execv(_python, [_python, *sys.orig_argv[1:]])
