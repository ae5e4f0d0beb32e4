"""Virtual ranks: a step is computed as V shares and summed as integers, on any number of ranks.

The global batch is split over V virtual ranks, the same for any number N <= V of real ones. A real
rank computes those it holds one after the other, each from the state at the start of the step.
The sums are exact, so neither N nor their order changes a bit:

  gradients          fixed point, one int64 each
  moving statistics  fixed point, two int64 each
  totals of the log  one row for each virtual rank, to which others add zeros

fixed_point.py has the grids. (EasyScale, SC'23, arXiv:2208.14228, has virtual ranks for PyTorch.)
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdkit.data.sampler import share
from hvdkit.logs import join
from hvdkit.ranks.stragglers import own_part
from hvdkit.ranks.world import World, raw
from hvdkit.settings import Settings
from hvdkit.train.layers.dropout import Seeds
from hvdkit.train.step import reduction
from hvdkit.train.step.across import Turn
from hvdkit.train.step.combine import (
    SAME,
    Rule,
    StateChange,
    check_micro_batches,
    from_ordered,
    joined,
    settled,
    split_by_change,
    to_ordered,
)
from hvdkit.train.step.gradients import (
    MicroBatches,
    StepTotals,
    means_of,
    overwritten,
    to_means,
)
from hvdkit.train.step.graph_checks import assigned_handles
from hvdkit.train.step.programs import Programs
from hvdkit.train.step.state import State
from hvdkit.train.virtual import fixed_point, gathered

_Values = list[tuple[tf.Variable, tf.Tensor]]

# A virtual rank's row of totals: the sums of `Forward`, then faults: not finite, a gradient beyond
# the grid, state beyond it, all gradients below it.
_NUM_FAULTS = 4

_SUMMED = ("mean", "sum")
_LARGEST = ("max", "min", "same")
_SMALLEST = Rule("min")


class _Sums(NamedTuple):
    """What one virtual rank gives, or what several add up to."""

    table: tf.Tensor  # float64 [V, row]: a row for each virtual rank; others have zeros
    # By target, gradients of all variables it depends on, in one [n]; int64 once added up.
    grads: list[tf.Tensor]
    state: tf.Tensor  # int64 [2, n]: all state that is combined by mean or sum
    largest: tf.Tensor  # int64 [n], of which the largest counts (combine.to_ordered)
    # int64 [n]: rows for queues, in the same numbers, at the virtual rank's place among zeros.
    rows: tf.Tensor


@dataclasses.dataclass
class _Found:
    """What tracing a virtual rank's pass finds, alike for all of them; `_pass` fills it."""

    gathers: bool = False  # whether the loss gathers rows
    # The untrained state that the forward pass changes. A frozen weight that it only reads stays as
    # it is, to the last bit.
    changed: list[StateChange] = dataclasses.field(default_factory=list)
    # By target, places of the variables it depends on, and their gradients' types.
    connected: list[dict[int, tf.DType]] = dataclasses.field(default_factory=list)


class Passes:
    """Forward, backward and reduction of a step: virtual rank by virtual rank, then over ranks.

    Nothing of a step is kept here: `reduce` hands on what one of its parts needs of another.
    """

    def __init__(
        self,
        config: Settings,
        world: World,
        *,
        forward: Callable[..., tuple[list[tf.Tensor], tf.Tensor]],
        state: State,
        micro_batches: MicroBatches,
        programs: Programs,
        rules: Mapping[int, Rule],
    ) -> None:
        self._count = config.virtual_ranks
        self._samples = config.global_batch_size // config.accumulation_steps
        shares = [share(self._samples, v, self._count) for v in range(self._count)]
        self._firsts = [s[0] for s in shares]
        self._sizes = [s[1] - s[0] for s in shares]
        self._own = range(*share(self._count, world.rank, world.size))
        self._own_sizes = sorted({self._sizes[v] for v in self._own})  # at most two
        self._jit = config.jit
        self._device = reduction.device(config)
        self._forward = forward
        self._state = state
        self._micro_batches = micro_batches
        self._programs = programs
        self._variables = state.model.trainable_variables
        self._seeds = Seeds(config.seed, state.task_state.generators)
        seeds = {id(v) for v in self._seeds.variables}
        self._untrained = [v for v in state.of_forward if id(v) not in seeds]
        self._rules = rules
        self._steps = config.accumulation_steps

    def reduce(self, batch: Any, votes: tf.Tensor) -> StepTotals:
        """Inside the step's tf.function, on every rank; `batch`: [micro-batches, samples, ...]."""
        for variable in self._variables:
            if overwritten(variable):
                raise ValueError(
                    f"--virtual_ranks does not add up {variable.path}, which its gradient "
                    "overwrites (as in float8): leave it out"
                )
        start = [
            (v, v.read_value()) for v in [*self._untrained, *self._seeds.variables]
        ]
        compute, found = self._traced(batch, start, shared=gathered.Rows())
        if found.gathers and self._jit:
            raise ValueError(
                "a loss that gathers rows, --jit and --virtual_ranks: leave out one"
            )
        if found.gathers:
            rows_of_all = self._exchange(batch, start)
            compute, found = self._traced(batch, start, shared=rows_of_all)
        total = self._over(self._own_sizes[0], compute)
        for size in self._own_sizes[1:]:
            total = self._over(size, compute, total)

        # Other ranks add zeros to a row, which changes no bit. The rows are summed here, in order.
        ready = own_part(total.table)
        own = tf.concat([tf.reshape(total.table, [-1]), votes], 0)
        totals = self._sum(own, "step.totals")
        num_votes = votes.shape[0]
        table = tf.reshape(totals[:-num_votes], total.table.shape)
        num_sums = table.shape[1] - _NUM_FAULTS
        sums, faults = tf.split(tf.reduce_sum(table, 0), [num_sums, _NUM_FAULTS])
        for variable, value in start:  # seeds, as if nothing had been drawn
            variable.assign(value)
        self._set_state(total, found.changed)
        return StepTotals(
            received=tf.concat([sums, totals[-num_votes:]], 0),
            losses=tf.reduce_sum(means_of(table[:, :num_sums]), 1),
            ready=ready,
            grads=self._means(total.grads, sums, faults, connected=found.connected),
            faults=faults,
        )

    def _traced(
        self, batch: Any, start: _Values, *, shared: gathered.Rows
    ) -> tuple[Callable[..., _Sums], _Found]:
        """A function of a virtual rank's number and size, its `_pass`; and what tracing it found.

        `shared`: the rows that losses gather; none before they are known.
        """
        found = _Found()

        def body(part: Any, rank: gathered.VirtualRank) -> _Sums:
            return self._pass(part, rank, start=start, shared=shared, found=found)

        compute = self._from_start(body, batch, start)
        for size in self._own_sizes:
            compute.get_concrete_function(tf.TensorSpec([], tf.int64), size)
        return compute, found

    def _from_start(
        self, body: Callable[..., Any], batch: Any, start: _Values
    ) -> tf.types.experimental.PolymorphicFunction:
        """`body(part of the batch, virtual rank, ...)`, from the state at the step's start.

        The arguments of the function that it returns: the rank's number, its size, and what `body`
        takes further.
        """

        # _noinline: the code around it must not change how TensorFlow fuses kernels.
        @tf.function(autograph=False, experimental_attributes={"_noinline": True})
        def one(number: tf.Tensor, size: int, *more: tf.Tensor) -> Any:
            rank = gathered.VirtualRank(
                number=number,
                first=tf.gather(tf.constant(self._firsts, tf.int64), number),
                size=size,
            )
            # The place of its first sample among this rank's samples.
            first = rank.first - self._firsts[self._own[0]]

            def cut(t: tf.Tensor) -> tf.Tensor:
                return tf.ensure_shape(
                    t[:, first : first + size], [t.shape[0], size, *t.shape[2:]]
                )

            for variable, value in start:
                variable.assign(value)
            self._seeds.assign(self._state.step, number)
            return body(tf.nest.map_structure(cut, batch), rank, *more)

        return one

    def _exchange(self, batch: Any, start: _Values) -> gathered.Rows:
        """Two passes more, where the loss gathers rows."""
        scale = self._state.loss_scale.read()
        first_passes = gathered.FirstPasses(
            self._in_turn, scale, rows=self._samples, addends=self._count
        )
        learn = self._from_start(first_passes.learn, batch, start)
        pull = self._from_start(first_passes.pull, batch, start)
        numbers = [tf.constant(number, tf.int64) for number in self._own]
        sizes = [self._sizes[number] for number in self._own]
        learned = [learn(number, size) for number, size in zip(numbers, sizes)]
        everyone = first_passes.over_ranks(learned)
        if not any(rows.dtype.is_floating for rows in everyone):
            return gathered.Rows(everyone)
        pulls = [pull(number, size, *everyone) for number, size in zip(numbers, sizes)]
        total = self._sum(tf.add_n(pulls), "virtual.pulls")
        return first_passes.unpack(everyone, total)

    def _in_turn(
        self, micro: Any, rank: gathered.VirtualRank, everyone: Sequence[tf.Tensor]
    ) -> tuple[Turn, Any]:
        """The forward pass, in which the loss may gather rows, those of all if they are known."""
        turn = Turn(rank.first, rank.size, everyone)
        return turn, self._forward(micro, turn=turn)

    def _over(
        self, size: int, compute: Callable[..., _Sums], total: _Sums | None = None
    ) -> _Sums:
        """Virtual ranks of one size, one after the other, added to `total`."""
        group = [v for v in self._own if self._sizes[v] == size]
        numbers = tf.constant(group, tf.int64)
        first = 0
        if total is None:
            total = self._add(None, compute(numbers[0], size=size))
            first = 1
        if first == len(group):
            return total
        return tf.while_loop(
            lambda index, _: index < len(group),
            lambda index, total: (
                index + 1,
                self._add(total, compute(numbers[index], size=size)),
            ),
            (tf.constant(first), total),
            parallel_iterations=1,  # they set the same state; it also bounds memory
        )[1]

    def _add(self, total: _Sums | None, addend: _Sums) -> _Sums:
        # float16's loss scale is taken out first: the grid is that of the true gradients.
        scale = self._state.loss_scale.read()
        gradients = []
        for target, flat in enumerate(addend.grads):
            known = None if total is None else total.grads[target]
            gradients.append(
                fixed_point.add_gradients(known, flat, addends=self._count, scale=scale)
            )
        if total is None:
            return addend._replace(grads=gradients)
        return _Sums(
            table=total.table + addend.table,
            grads=gradients,
            state=total.state + addend.state,
            largest=tf.maximum(total.largest, addend.largest),
            rows=total.rows + addend.rows,
        )

    def _pass(
        self,
        part: Any,
        rank: gathered.VirtualRank,
        *,
        start: _Values,
        shared: gathered.Rows,
        found: _Found,
    ) -> _Sums:
        """Forward and backward of a virtual rank on its part of the batch; fills `found`."""

        def forward(micro: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
            turn, (targets, sums) = self._in_turn(micro, rank, shared.everyone)
            found.gathers = bool(turn.own)
            found.changed = self._state_changes(start)
            if shared.pulls:
                pulled = [shared.pulled(turn, i) for i in range(len(targets))]
                targets = [
                    t + tf.cast(more, t.dtype) for t, more in zip(targets, pulled)
                ]
            return targets, sums

        passes = partial(self._micro_batches.gradients, forward)
        _, sums, gradients = self._programs.run(passes, part)
        found.connected = []
        packed = []
        for by_place in gradients:
            found.connected.append({place: g.dtype for place, g in by_place.items()})
            packed.append(fixed_point.pack(list(by_place.values())))
        summed = [
            tf.cast(change.variable, tf.float64)
            for change in _of_kinds(found.changed, *_SUMMED)
        ]
        largest = [
            to_ordered(change.rule, change.variable.read_value())
            for change in _of_kinds(found.changed, *_LARGEST)
        ]
        # Of what must be the same, the smallest too: it must be the largest.
        largest += [
            to_ordered(_SMALLEST, change.variable.read_value())
            for change in _of_kinds(found.changed, "same")
        ]
        rows = [
            self._placed(change, rank)
            for change in _of_kinds(found.changed, "concatenate")
        ]
        state = fixed_point.pack(summed)

        own = tf.range(self._count, dtype=tf.int64)[:, None] == rank.number
        faults = tf.stack(self._faults(packed, state, rows_beyond=shared.beyond))
        row = tf.concat([sums, tf.cast(faults, tf.float64)], 0)[None]
        return _Sums(
            table=tf.where(own, row, tf.zeros_like(row)),
            grads=packed,
            state=fixed_point.state_to_fixed(state, self._count),
            largest=_in_a_row(largest),
            rows=_in_a_row(rows),
        )

    def _faults(
        self,
        packed: Sequence[tf.Tensor],
        state: tf.Tensor,
        *,
        rows_beyond: tf.Tensor | bool,
    ) -> list[tf.Tensor]:
        """Of a virtual rank's gradients and state: those of a row of totals, bool scalars.

        `rows_beyond`: whether a gradient by gathered rows is beyond the grid.
        """
        scale = self._state.loss_scale.read()
        judged = [fixed_point.judge(flat, self._count, scale=scale) for flat in packed]
        finite, fits, precise = (tf.reduce_all(verdicts) for verdicts in zip(*judged))
        state_finite, state_fits, _ = fixed_point.judge(
            state, self._count, most=fixed_point.LARGEST_STATE
        )
        beyond = (finite & ~fits) | rows_beyond
        return [~(finite & state_finite), beyond, state_finite & ~state_fits, ~precise]

    def _placed(self, change: StateChange, rank: gathered.VirtualRank) -> tf.Tensor:
        """The rows that a virtual rank appended, at its place among those of all."""
        variable = change.variable
        each = int(change.rule.number)
        if variable.shape[0] < rank.size * each:
            raise ValueError(
                f"{variable.name} keeps {variable.shape[0]} rows, fewer than a virtual rank's "
                "samples add: make it longer, or leave out --virtual_ranks"
            )
        rows = to_ordered(change.rule, variable.read_value()[-rank.size * each :])
        before = rank.first * each
        after = (self._samples - rank.size) * each - before
        rows = tf.pad(rows, [[before, after], *[[0, 0] for _ in variable.shape[1:]]])
        return tf.ensure_shape(rows, [self._samples * each, *variable.shape[1:]])

    def _state_changes(self, start: _Values) -> list[StateChange]:
        """What the forward pass, which this graph holds, changes of the state.

        ValueError where virtual ranks cannot combine it.
        """
        changed = {id(v) for v in assigned_handles(tf.compat.v1.get_default_graph())}
        trained = [v.path for v in self._variables if id(raw(v).handle) in changed]
        if trained:
            raise ValueError(
                f"the forward pass assigns {join(trained)}, which the optimizer trains (as Keras's "
                "SpectralNormalization does): each virtual rank would do it again. "
                "Leave out --virtual_ranks"
            )
        before = {id(variable): value for variable, value in start}
        changes = []
        for variable in self._untrained:
            if id(variable.handle) in changed:
                if variable.dtype.is_complex:
                    raise ValueError(
                        f"the forward pass changes {variable.name}, of complex numbers, which "
                        "--virtual_ranks does not bring together: leave it out"
                    )
                rule = self._rules.get(id(variable), SAME)
                changes.append(StateChange(variable, rule, before[id(variable)]))
        check_micro_batches(changes, self._steps)
        return changes

    def _means(
        self,
        totals: list[tf.Tensor],
        sums: tf.Tensor,
        faults: tf.Tensor,
        *,
        connected: Sequence[Mapping[int, tf.DType]],
    ) -> list[tf.Tensor | None]:
        """Over the global batch, None where there is no gradient; NaN where a sum is not whole."""
        nan = tf.constant(math.nan, tf.float64)
        factor = tf.where(tf.reduce_any(faults[:3] > 0), nan, tf.ones_like(nan))
        factors = [*tf.unstack(to_means(sums) * factor), factor]
        types: dict[int, tf.DType] = {}
        for by_place in connected:
            types.update(by_place)
        # Gradients are rounded once: after the sum, where two targets are added.
        is_rounded_at_once = len(totals) == 1 and tf.float64 not in types.values()
        dtype = tf.float32 if is_rounded_at_once else tf.float64
        means: list[tf.Tensor | None] = [None] * len(self._variables)
        for target, (total, places) in enumerate(zip(totals, connected)):
            if not places:  # a target may depend on no variable
                continue
            total = self._sum(total, f"virtual.gradients.{target}")
            shapes = [self._variables[place].shape for place in places]
            parts = fixed_point.unpack_gradients(
                total, factors[target], shapes=shapes, dtype=dtype
            )
            for place, part in zip(places, parts):
                means[place] = part if means[place] is None else means[place] + part
        for place, dtype in types.items():
            means[place] = tf.cast(means[place], dtype)
        return means

    def _set_state(self, total: _Sums, changed: Sequence[StateChange]) -> None:
        """Sets what the forward pass changes to what its values on virtual ranks make."""
        if summed := _of_kinds(changed, *_SUMMED):
            state = fixed_point.state_from_fixed(
                self._sum(total.state, "virtual.state")
            )
            for (variable, rule, before), value in split_by_change(summed, state):
                if rule.kind == "mean":
                    value = value / self._count
                else:  # every virtual rank's value has the old one in it
                    old = rule.number**self._steps * tf.cast(before, tf.float64)
                    value -= self._count * tf.reshape(old, [-1])
                variable.assign(settled(rule, before, value, steps=self._steps))
        if largest := _of_kinds(changed, *_LARGEST):
            same = _of_kinds(changed, "same")
            values = self._sum(total.largest, "virtual.most", op=hvd.Max)
            parts = list(split_by_change([*largest, *same], values))
            for (variable, rule, before), numbers in parts[: len(largest)]:
                variable.assign(from_ordered(rule, before, numbers))
            for (variable, _, before), numbers in parts[len(largest) :]:
                smallest = from_ordered(_SMALLEST, before, numbers)
                _check_same(variable, smallest)
        if queues := _of_kinds(changed, "concatenate"):
            every = self._sum(total.rows, "virtual.rows")
            for variable, rule, before in queues:
                count = self._samples * int(rule.number)
                size = count * before.shape[1:].num_elements()
                form = tf.zeros([count, *before.shape[1:]], before.dtype)
                rows = from_ordered(rule, form, every[:size])
                every = every[size:]
                variable.assign(joined(before, rows))

    def _sum(self, tensor: tf.Tensor, name: str, op: int = hvd.Sum) -> tf.Tensor:
        return hvd.allreduce(tensor, op=op, name=name, device_dense=self._device)


def _of_kinds(changes: Sequence[StateChange], *kinds: str) -> list[StateChange]:
    return [change for change in changes if change.rule.kind in kinds]


def _in_a_row(numbers: Sequence[tf.Tensor]) -> tf.Tensor:
    """int64 [n] of tensors of any shape."""
    flat = [tf.reshape(tensor, [-1]) for tensor in numbers]
    return tf.concat([tf.zeros([0], tf.int64), *flat], 0)


def _check_same(variable: tf.Variable, smallest: tf.Tensor) -> None:
    """Ends the run where virtual ranks made other values, of which the variable has the largest."""
    value = variable.read_value()
    if value.dtype.is_floating:  # NaN is no number, but the same
        value = tf.where(tf.math.is_nan(value), tf.zeros_like(value), value)
        smallest = tf.where(tf.math.is_nan(smallest), tf.zeros_like(smallest), smallest)
    tf.debugging.assert_equal(
        value,
        smallest,
        f"virtual ranks change {variable.name} each in their own way: declare how their values "
        "come together, `combines` in the layer or the task (hvdkit/train/step/combine.py)",
    )
