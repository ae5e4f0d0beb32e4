"""Parts of a step that XLA compiles, each as one program of its own."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


class Programs:
    """Runs functions as programs of XLA with --jit, and as they are without it.

    Attributes:
      compiled: what was traced for XLA, in order; the graph of the step calls it.
    """

    def __init__(self, *, jit: bool) -> None:
        self._jit = jit
        self.compiled: list[tf.types.experimental.ConcreteFunction] = []

    def run(self, function: Callable[..., Any], *tensors: Any) -> Any:
        """What `function` returns for nested tensors; inside the step's function."""
        if not self._jit:
            return function(*tensors)
        program = tf.function(function, autograph=False, jit_compile=True)
        traced = program.get_concrete_function(*tensors)
        self.compiled.append(traced)
        return traced(*tensors)
