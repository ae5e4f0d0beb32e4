"""Reductions, steps and batch norm, all in one launch by test_numbers.py: ranks start slowly."""

from checks_batch_norm import *  # noqa: F403
from checks_models import *  # noqa: F403
from checks_reduction import *  # noqa: F403
from checks_step import *  # noqa: F403
