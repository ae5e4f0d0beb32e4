"""What every command does first, before TensorFlow is imported: read its settings."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import config as config_lib
from config import Config
from engine.stop import WRONG_USE, complain, launch_rank


def settings(argv: Sequence[str]) -> Config:
    """As `config.parse`; for what is wrong rank 0 prints a message, and every rank exits with 2."""
    try:
        return config_lib.parse(argv)
    except ValueError as error:
        if launch_rank() == 0:
            complain(str(error))
        sys.exit(WRONG_USE)
