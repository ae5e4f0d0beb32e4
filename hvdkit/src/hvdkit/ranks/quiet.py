"""Imports TensorFlow without its start-up lines, which say nothing about a run.

Import this before TensorFlow. No setting of TensorFlow 2.21 holds these lines back (they are
written before its logging is set up), so standard error is looked through while it is imported:
what is not known to be noise still comes out.
"""

import contextlib
import gc
import os
import re
import sys
import tempfile

from hvdkit import streams
from hvdkit.ranks import keras_defaults

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

_NOISE = re.compile(rb"::InitializeLog|oneDNN custom operations|^I0000 |rebuild TensorFlow with")


def _import_tensorflow() -> None:
    # Keras imports these where they are installed, a third of these seconds, for wrappers and
    # galleries that no run uses (keras.visualization will say that Matplotlib is not installed).
    # None means "not installed" while it looks.
    hidden = [name for name in ("sklearn", "matplotlib") if name not in sys.modules]
    sys.modules |= dict.fromkeys(hidden)  # type: ignore[arg-type]
    # What is made here stays: to look through it for what might go takes a fifth of them.
    gc.disable()
    streams.open_closed()
    sys.stderr.flush()
    shown = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            with keras_defaults.in_place():
                import tensorflow  # noqa: F401

                # isort: split
                import keras  # noqa: F401
        finally:
            gc.enable()
            gc.freeze()
            for name in hidden:
                del sys.modules[name]
            os.dup2(shown, 2)
            os.close(shown)
            held.seek(0)
            for line in held:
                if not _NOISE.search(line):
                    with contextlib.suppress(OSError):  # nobody reads it
                        os.write(2, line)


_import_tensorflow()
