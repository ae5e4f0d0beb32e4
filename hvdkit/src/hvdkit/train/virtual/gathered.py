"""Rows that a loss gathers over virtual ranks (`across.gather`), whose turns come one by one.

Three passes over them. The first learns what each gathers. The second, with the rows of all, finds
the gradient of each one's loss by these rows, and adds these gradients up: as whole numbers, so
that no order changes a bit. The third is the step's own: a virtual rank's loss gets
sum(own rows * their part of that gradient) more, whose gradient by the weights is that of all other
losses through its rows (GradCache: Gao et al. 2021, arXiv:2101.06983).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdkit.train.step.across import Turn
from hvdkit.train.step.losses import widest
from hvdkit.train.virtual import fixed_point


class VirtualRank(NamedTuple):
    """Whose turn it is: its number, and its samples, `size` from `first` on, of a micro-batch."""

    number: tf.Tensor  # int64 scalar
    first: tf.Tensor  # int64 scalar, among the samples of all ranks
    size: int


class Rows(NamedTuple):
    """By call of `gather`, rows of the global batch; by target, gradients with respect to them."""

    everyone: Sequence[tf.Tensor] = ()
    # The gradients of all losses; none for a call that gathered whole numbers.
    pulls: Sequence[Sequence[tf.Tensor]] = ()
    # Whether a virtual rank's are too large for the grid.
    beyond: tf.Tensor | bool = False

    def pulled(self, turn: Turn, target: int) -> tf.Tensor:
        """Extra loss term, a scalar, that carries the other ranks' gradient."""
        share = slice(turn.first, turn.first + turn.size)
        sums = []
        for own, pull in zip(_floats(turn.own), self.pulls[target]):
            sums.append(tf.reduce_sum(own * tf.cast(pull[share], own.dtype)))
        dtype = widest(sums)
        return tf.add_n([tf.cast(x, dtype) for x in sums])


class FirstPasses:
    """The first two passes, and what goes between the ranks after each."""

    def __init__(
        self, in_turn: Callable, scale: tf.Variable, *, rows: int, addends: int
    ) -> None:
        """`in_turn`: the forward pass of (micro-batch, virtual rank, rows of all).

        `scale`: of the loss; `rows` of the global batch; `addends`: how many virtual ranks.
        """
        self._in_turn = in_turn
        self._scale = scale
        self._addends = addends
        # A row's part of a mean is small: a power of two brings it near to 1.
        self._rows = rows
        self._finest = 2.0 ** -math.floor(math.log2(rows))
        self._targets = 0  # set when the second pass is traced

    def learn(self, part: Any, rank: VirtualRank) -> list[tf.Tensor]:
        """What a virtual rank gathers of its own, by call."""
        return self._forward(part, rank, ())[0].own

    def pull(self, part: Any, rank: VirtualRank, *everyone: tf.Tensor) -> tf.Tensor:
        """int64 [n + 2]: a virtual rank's gradients by the rows of all, n numbers on the grid.

        Then two faults, 1 or 0: a gradient is not finite; one is finite but too large.
        """
        floats = _floats(everyone)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(floats)
            _, (targets, _) = self._forward(part, rank, everyone)
        self._targets = len(targets)
        gradients = []
        for target in targets:
            gradients += tape.gradient(target, floats, unconnected_gradients="zero")
        flat = fixed_point.pack(
            [tf.convert_to_tensor(gradient) for gradient in gradients]
        )
        scale = self._unit()
        finite, fits, _ = fixed_point.judge(flat, self._addends, scale=scale)
        fixed = fixed_point.add_gradients(
            None, flat, addends=self._addends, scale=scale
        )
        return tf.concat([fixed, tf.cast([~finite, finite & ~fits], tf.int64)], 0)

    def over_ranks(self, learned: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """From what each of this rank's shares gathered to the rows of all, by call."""
        everyone = []
        for number, rows in enumerate(zip(*learned)):
            own = tf.concat(rows, 0)
            gathered = hvd.allgather(own, name=f"virtual.gathered.{number}")
            everyone.append(tf.ensure_shape(gathered, [self._rows, *own.shape[1:]]))
        return everyone

    def unpack(self, everyone: Sequence[tf.Tensor], total: tf.Tensor) -> Rows:
        """The rows of all, with the gradients that `pull` packed.

        `total`: what `pull` returned, int64 [n + 2], added up over all virtual ranks. All gradients
        are NaN where those of any virtual rank were not finite, or too large for the grid.
        """
        faults = total[-2:]
        unit = self._unit()
        factor = tf.where(tf.reduce_any(faults > 0), math.nan * unit, unit)
        # `pull` packs target by target, each with gradients by the same rows.
        shapes = [x.shape for x in _floats(everyone)]
        gradients = fixed_point.unpack_gradients(
            total[:-2], factor, shapes=shapes * self._targets, dtype=tf.float64
        )
        pulls = []
        for target in range(self._targets):
            first = target * len(shapes)
            pulls.append(gradients[first : first + len(shapes)])
        return Rows(everyone, pulls, beyond=faults[1] > 0)

    def _forward(
        self, part: Any, rank: VirtualRank, everyone: Sequence[tf.Tensor]
    ) -> Any:
        micro = tf.nest.map_structure(lambda t: t[0], part)
        return self._in_turn(micro, rank, everyone)

    def _unit(self) -> tf.Tensor:
        """Gradients are divided by it before they go on the grid, and multiplied by it after."""
        return tf.cast(self._scale, tf.float64) * self._finest


def _floats(rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return [x for x in rows if x.dtype.is_floating]
