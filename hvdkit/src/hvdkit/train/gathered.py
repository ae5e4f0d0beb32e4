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

from hvdkit.train import fixed_point
from hvdkit.train.across import Turn


class Rows(NamedTuple):
    """By call of `gather`, rows of the global batch; by target, the gradients of all by them."""

    everyone: Sequence[tf.Tensor] = ()
    pulls: Sequence[Sequence[tf.Tensor]] = ()  # none for a call that gathered whole numbers
    beyond: tf.Tensor | bool = False  # whether a virtual rank's are too large for the grid

    def pulled(self, turn: Turn, target: int) -> tf.Tensor:
        """What a virtual rank's loss gets more, a scalar, for the sake of its gradient."""
        part = slice(turn.first, turn.first + turn.size)
        pairs = zip(_floats(turn.own), self.pulls[target])
        sums = [tf.reduce_sum(own * tf.cast(p[part], own.dtype)) for own, p in pairs]
        widest = max((x.dtype for x in sums), key=lambda dtype: dtype.size)
        return tf.add_n([tf.cast(x, widest) for x in sums])


class Passes:
    """The first two passes, and what goes between the ranks after each."""

    def __init__(self, in_turn: Callable, scale: tf.Variable, *, rows: int, addends: int) -> None:
        """`scale`: of the loss; `rows` of the global batch; `addends`: the virtual ranks."""
        self._in_turn = in_turn
        self._scale = scale
        self._addends = addends
        # A row's part of a mean is small: it is brought near to 1, by a power of two.
        self._rows = rows
        self._finest = 2.0 ** -math.floor(math.log2(rows))
        self._targets = 0  # once the second pass is traced

    def learn(self, part: Any, number: tf.Tensor) -> list[tf.Tensor]:
        return self._turn(part, ())[0].own

    def pull(self, part: Any, number: tf.Tensor, *everyone: tf.Tensor) -> tf.Tensor:
        """int64 [n + 2]: gradients by all rows, in one; 1 where not finite, 1 where too large."""
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(floats := _floats(everyone))
            _, (targets, _) = self._turn(part, everyone)
        self._targets = len(targets)
        found = [g for t in targets for g in tape.gradient(t, floats, unconnected_gradients="zero")]
        flat = fixed_point.pack(list(map(tf.convert_to_tensor, found)))
        scale = self._unit()
        finite, fits, _ = fixed_point.judge(flat, self._addends, scale=scale)
        fixed = fixed_point.add_gradients(None, flat, addends=self._addends, scale=scale)
        return tf.concat([fixed, tf.cast([~finite, finite & ~fits], tf.int64)], 0)

    def over_ranks(self, learned: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """From what each of this rank's shares gathered to the rows of all, by call."""
        own = [tf.concat(rows, 0) for rows in zip(*learned)]
        every = [hvd.allgather(x, name=f"virtual.gathered.{i}") for i, x in enumerate(own)]
        return [tf.ensure_shape(x, [self._rows, *one.shape[1:]]) for x, one in zip(every, own)]

    def rows(self, everyone: Sequence[tf.Tensor], total: tf.Tensor) -> Rows:
        """`total`: what `pull` found, added up over all virtual ranks."""
        shapes = [x.shape for x in _floats(everyone)]
        unit = self._unit()
        sound = tf.where(tf.reduce_any(total[-2:] > 0), math.nan * unit, unit)
        found = fixed_point.unpack_gradients(
            total[:-2], sound, shapes=shapes * self._targets, dtype=tf.float64
        )
        count = len(shapes)
        pulls = [found[i * count :][:count] for i in range(self._targets)]
        return Rows(everyone, pulls, beyond=total[-1] > 0)

    def _turn(self, part: Any, everyone: Sequence[tf.Tensor]) -> Any:
        return self._in_turn(tf.nest.map_structure(lambda t: t[0], part), everyone)

    def _unit(self) -> tf.Tensor:
        return tf.cast(self._scale, tf.float64) * self._finest


def _floats(rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return [x for x in rows if x.dtype.is_floating]
