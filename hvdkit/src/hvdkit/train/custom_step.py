"""Whether train.py's `make_step` is the template's, so that the engine's may take its place."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable

from hvdkit.settings import Settings
from hvdkit.train import reduction

PLAIN = """
def make_step(run):
    @run.function
    def step(batch):
        with tf.GradientTape() as tape:
            loss = run.loss(batch)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, **run.reduction)
        gradients = tape.gradient(loss, run.weights, use_generic_names=True)
        return run.update(gradients)
    return step
"""


def check_plain(make: Callable, settings: Settings) -> None:
    """Raises ValueError where `make` is another step than the template's.

    Virtual ranks and messages of their own need the engine's step, which would silently ignore
    changes to train.py's. Comments, docstrings and annotations may differ.
    """
    try:
        if _form(inspect.getsource(make)) == _form(PLAIN):
            return
    except (OSError, TypeError, SyntaxError):
        pass  # a lambda, a partial: not the template's
    flag = reduction.needs_own_step(settings)
    raise ValueError(
        f"--{flag}={getattr(settings, flag)} brings a step of the engine's own, and make_step in "
        f"train.py is not the template's: leave out --{flag}, or use the template's make_step"
    )


def _form(source: str) -> str:
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.dump(tree)
