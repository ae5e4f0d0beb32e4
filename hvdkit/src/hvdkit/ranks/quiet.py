"""Imports TensorFlow without its start-up lines, which say nothing about a run.

Import this before TensorFlow. No setting of TensorFlow 2.21 holds these lines back (they are
written before its logging is set up), so standard error is looked through while it is imported:
what is not known to be noise still comes out.
"""

import contextlib
import gc
import logging
import os
import re
import sys
import tempfile

from hvdkit import streams
from hvdkit.logs import refuse
from hvdkit.ranks import fingerprint, keras_defaults
from hvdkit.stop import NOT_NOW, WRONG_USE

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Where the home folder cannot be written, it warns that it makes a temporary one.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

_NOISE = re.compile(
    rb"::InitializeLog|oneDNN custom operations|^I0000 |rebuild TensorFlow with"
)


def _check_environment() -> None:
    """TensorFlow writes small files, and takes names of files in UTF-8."""
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8":
        refuse(
            f"Python writes names of files in {encoding} here, and TensorFlow in UTF-8: set a "
            "UTF-8 locale (LC_ALL=C.UTF-8) or PYTHONUTF8=1"
        )
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        is_full = os.access(os.environ.get("TMPDIR", "/tmp"), os.W_OK)
        refuse(
            f"{error.strerror}: make room in one, or name another in TMPDIR (docker: --tmpfs /tmp)",
            NOT_NOW if is_full else WRONG_USE,
        )


def _check_cpu() -> None:
    """TensorFlow would abort, and what it says then is held back here."""
    flags = fingerprint.flags_of_cpu()
    # An emulator may show another processor's.
    if "sse2" in flags and "avx" not in flags:
        refuse(
            f"the CPU of {os.uname().nodename} has no AVX, which TensorFlow needs: it is old, or a "
            "virtual machine hides it (choose the host's CPU type)"
        )


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
    # In memory: a container may have no folder that can be written.
    with open(os.memfd_create("stderr"), "w+b") as held:
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
                    with contextlib.suppress(OSError):  # Nobody may read it any more.
                        os.write(2, line)


_check_environment()
_check_cpu()
_import_tensorflow()
