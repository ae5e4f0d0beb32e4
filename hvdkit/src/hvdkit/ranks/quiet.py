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
import site
import sys
import tempfile
from importlib.machinery import PathFinder

from hvdkit import streams
from hvdkit.launcher import launch_rank
from hvdkit.logs import refuse, say
from hvdkit.ranks import fingerprint, keras_defaults
from hvdkit.stop import NOT_NOW, WRONG_USE

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Where the home folder cannot be written, it warns that it makes a temporary one.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

_NOISE = re.compile(
    rb"::InitializeLog|oneDNN custom operations|^I0000 |rebuild TensorFlow with"
)

# Packages whose versions must fit each other.
_FIT = ("tensorflow", "keras", "numpy", "h5py")


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


def _note_other_packages() -> None:
    """A cluster's modules put folders into PYTHONPATH, which come before the environment's."""
    own = {os.path.realpath(folder) for folder in site.getsitepackages()}
    others = []
    for name in _FIT:
        spec = PathFinder.find_spec(name)
        if spec and spec.origin:
            folder = os.path.dirname(os.path.dirname(spec.origin))
            if os.path.realpath(folder) not in own:
                others.append(f"{name} of {folder}")
    if others and launch_rank() == 0:
        say(
            f"note: not of this environment ({sys.prefix}): {', '.join(others)}, which may not "
            "fit the rest: see PYTHONPATH, and unload modules that set it"
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
_note_other_packages()
_check_cpu()
_import_tensorflow()
