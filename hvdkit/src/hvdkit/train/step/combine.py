"""How state that a forward pass changes comes together over ranks and virtual ranks.

  mean                mean over shares of the batch, by their size (moving averages of means)
  sum                 the old value and what each share added to it (counters)
  ("sum", 0.99)       the same where an update keeps 0.99 of the old value (averages of counts)
  max, min            the largest or smallest of all (observers of ranges)
  concatenate         tf.concat([old, rows], 0)[-n:], rows of all shares in order, one a sample
  ("concatenate", 2)  the same with two rows a sample (queues)
  same                each rank's own, which must be equal on all

Declared by a layer or its class, `combines = "sum"`, or by its variables' names, `combines =
{"counts": ("sum", 0.99)}`; by a variable, `variable.combines = "max"`; or by the task, whose
`combines` is a dict of layer classes and of names, with wildcards, as a checkpoint has them.
"""

import copy
import fnmatch
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvdkit.logs import join
from hvdkit.ranks.world import World, raw
from hvdkit.settings import Settings
from hvdkit.train.layers import dropout
from hvdkit.train.layers.batch_norm import moving_ids
from hvdkit.train.step import reduction
from hvdkit.train.step.graph_checks import assigned_handles
from hvdkit.train.step.state import State

KINDS = ("mean", "sum", "max", "min", "concatenate", "same")
_KNOWN = {
    keras.layers.BatchNormalization: {"moving_mean": "mean", "moving_variance": "mean"},
    keras.layers.SpectralNormalization: "same",
}


class Rule(NamedTuple):
    kind: str
    # For a sum: what one update keeps of the old value. For concatenate: rows a sample.
    number: float = 1.0


# Default for variables without a rule: a trial looks at them (trial.py).
SAME = Rule("same")


class StateChange(NamedTuple):
    variable: tf.Variable
    rule: Rule
    before: tf.Tensor  # its value at the start of the step


def rules(state: State, task: Any) -> dict[int, Rule]:
    """Rules by id of the tf.Variable. Raises ValueError for one that is malformed or unused."""
    declared = getattr(task, "combines", {})
    rule_of = {}
    for layer in state.task_state.layers:
        default = next(
            (rule for kind, rule in _KNOWN.items() if isinstance(layer, kind)), None
        )
        of_layer = declared.get(type(layer), getattr(layer, "combines", default))
        for variable in [*layer._trainable_variables, *layer._non_trainable_variables]:
            rule = of_layer
            if isinstance(of_layer, Mapping):
                rule = of_layer.get(variable.name)
            if rule:
                rule_of[id(raw(variable))] = _rule(rule, variable.name)
    for seed in _seeds(state):
        rule_of[id(seed)] = SAME

    patterns = {key: rule for key, rule in declared.items() if isinstance(key, str)}
    unused = set(patterns)
    for name, variable in state.variables.items():
        matching = [key for key in patterns if fnmatch.fnmatchcase(name, key)]
        unused.difference_update(matching)
        rule = (
            patterns[matching[0]] if matching else getattr(variable, "combines", None)
        )
        if rule:
            rule_of[id(raw(variable))] = _rule(rule, name)
    for name, variable in state.variables.items():
        found = rule_of.get(id(raw(variable)), SAME)
        if raw(variable).dtype.is_complex and found.kind != "same":
            raise ValueError(
                f"{name} combines by {found.kind!r}, which complex numbers do not: keep its real "
                "and imaginary part in variables of their own"
            )
    for key in patterns:
        if key in unused:
            raise ValueError(f"the task's combines: no variable's name is like {key!r}")
    return rule_of


class Combiner:
    """Combines over ranks what the forward passes of a step change."""

    def __init__(
        self, world: World, settings: Settings, state: State, *, task: Any, spec: Any
    ) -> None:
        """`spec`: of this rank's batch. Stop, on all ranks, where a rule is malformed."""
        with world.fail_together("combining state"):
            self.rules = rules(state, task)
        self._state = state
        self._device = reduction.device(settings)
        self.assigned: dict[int, tf.Tensor] = {}  # handles by their ids
        self._seeds = {id(v) for v in _seeds(state)}
        self._combines = True
        self._set_share(world, settings, spec)

    def _set_share(self, world: World, settings: Settings, spec: Any) -> None:
        self._size = world.size
        self._steps = settings.accumulation_steps
        self._samples = tf.nest.flatten(spec)[0].shape[1]
        self._share = self._samples * self._steps / settings.global_batch_size

    def of_part(
        self, world: World, settings: Settings, batch: Any, *, uses: bool
    ) -> "Combiner":
        """The same for a rank of a trial; `uses`: whether it combines anything."""
        twin = copy.copy(self)
        twin._set_share(world, settings, batch)
        twin._combines = uses
        return twin

    def begin(self, assigned: dict[int, tf.Tensor]) -> None:
        """Of a step's function: what its forward passes assign, as far as it is known.

        What those of another function assign must not be combined in this one's step.
        """
        self.assigned = assigned

    def look(self, graph: tf.Graph, before: Container[str]) -> None:
        """Learns what a forward pass in this graph assigns, once it is traced.

        `before`: names of the graph's operations before it.
        """
        operations = [op for op in graph.get_operations() if op.name not in before]
        for handle in assigned_handles(graph, operations):
            self.assigned[id(handle)] = handle

    def assigns(self, variable: tf.Variable) -> bool:
        """Whether a forward pass that was looked at changes it."""
        return id(variable.handle) in self.assigned

    def changes(self) -> bool:
        """Whether a forward pass changes state that must come together."""
        return any(self.assigns(raw(v)) for v in self._named().values())

    def values(self) -> dict[str, np.ndarray]:
        """State as it is, by name, but for what ranks may hold for themselves in between."""
        return {name: raw(v).numpy() for name, v in self._named().items()}

    def kept(
        self, names: Collection[str], draw: int
    ) -> list[tuple[tf.Variable, tf.Tensor]]:
        """State of these names that a forward pass changes, and the seeds; each with its value.

        `draw`: added to the seeds that differ between ranks (`RankSeedGenerator`).
        """
        pairs = []
        for name, variable in self._named().items():
            if name in names and self.assigns(raw(variable)):
                pairs.append((raw(variable), raw(variable).read_value()))
        for generator in self._state.task_state.generators:
            seed = raw(generator.state)
            value = seed.read_value()
            if draw and dropout.draws_by_rank(generator):
                value += tf.constant([draw, 0], value.dtype)
            pairs.append((seed, value))
        return pairs

    def _named(self) -> dict[str, Any]:
        untrained = {id(variable) for variable in self._state.untrained}
        shared = untrained - moving_ids(self._state.model) - self._seeds
        shared |= {id(weight) for weight in self._weights() if self.assigns(weight)}
        return {n: v for n, v in self._state.variables.items() if id(raw(v)) in shared}

    def _weights(self) -> list[tf.Variable]:
        return [raw(weight) for weight in self._state.model.trainable_variables]

    def over_ranks(
        self,
        before: Mapping[int, tf.Tensor],
        variables: Sequence[tf.Variable] | None = None,
    ) -> None:
        """Combines state by its rules over ranks; every rank calls it, inside the step.

        It combines what forward passes change; or `variables`, which the step's function changes
        by itself. Moving statistics of the model have a sync of their own.

        `before`: values at the start of the step, by the variable's id.
        """
        if self._size == 1 or not self._combines:
            return
        steps = 1
        if variables is None:
            steps = self._steps
            candidates = [*self._state.of_forward, *self._weights()]
            variables = [v for v in candidates if self.assigns(v)]
        changed = self._changed(variables, before)
        check_micro_batches(changed, self._steps)

        sums = []
        largest = []
        rows: list[tf.Tensor] = []
        for variable, rule, start in changed:
            if rule.kind == "mean":
                sums.append(tf.cast(variable, tf.float64) * self._share)
            elif rule.kind == "sum":
                old = rule.number**steps * tf.cast(start, tf.float64)
                sums.append(tf.cast(variable, tf.float64) - old)
            elif rule.kind in ("max", "min"):
                largest.append(to_ordered(rule, variable.read_value()))
            elif rule.kind == "concatenate":
                added = variable.read_value()[-self._samples * int(rule.number) :]
                rows.append(hvd.allgather(added, name=f"state.rows.{len(rows)}"))
        sums = self._reduced(sums, hvd.Sum, "state.sums")
        largest = self._reduced(largest, hvd.Max, "state.most")

        for variable, rule, start in changed:
            if rule.kind == "concatenate":
                variable.assign(joined(start, rows.pop(0)))
            elif rule.kind in ("max", "min"):
                variable.assign(from_ordered(rule, start, largest.pop(0)))
            elif rule.kind in ("mean", "sum"):
                variable.assign(settled(rule, start, sums.pop(0), steps=steps))

    def _changed(
        self, candidates: Sequence[tf.Variable], before: Mapping[int, tf.Tensor]
    ) -> list[StateChange]:
        """Of these, the ones that have a rule and no sync of their own."""
        synced = moving_ids(self._state.model)
        changed = []
        for variable in candidates:
            place = id(variable)
            if place in self.rules and place not in synced:
                changed.append(StateChange(variable, self.rules[place], before[place]))
        return changed

    def _reduced(
        self, values: Sequence[tf.Tensor], op: int, name: str
    ) -> list[tf.Tensor]:
        """One collective for all; none where there is nothing."""
        if not values:
            return []
        flat = tf.concat([tf.reshape(v, [-1]) for v in values], 0)
        flat = hvd.allreduce(flat, op=op, name=name, device_dense=self._device)
        return tf.split(flat, [v.shape.num_elements() for v in values])

    def judge(self, wrong: Sequence[str], without: Collection[str]) -> list[str]:
        """Notes on state that is another on two ranks than on one.

        `wrong`: names; `without`: those of them that would be right without a rule. Raises
        ValueError, but for a mean, which may depend on the number of ranks.
        """
        notes = []
        undeclared = []
        named = self._named()
        for name in wrong:
            rule = self.rules.get(id(raw(named[name])), SAME)
            if rule.kind == "same":
                undeclared.append(name)
            elif rule.kind == "mean":
                notes.append(
                    f"{name} is no mean of its samples (as a variance is none), so its mean over "
                    "ranks depends on their number"
                )
            elif name in without:
                raise ValueError(
                    f"{name} combines by {rule.kind!r}, and is the same on all ranks before: its "
                    "rows are gathered already: leave the rule out"
                )
            else:
                raise ValueError(
                    f"{name} combines by {rule.kind!r}, which makes another value of what two "
                    "parts of a batch give than the whole batch gives: declare another rule, or "
                    "change the layer (hvdkit/train/step/combine.py)"
                )
        if undeclared:
            inside = [name for name in undeclared if self.assigns(raw(named[name]))]
            changer = "the forward pass" if inside else "the step"
            raise ValueError(
                f"{changer} changes {join(inside or undeclared)} by the samples of a rank's share: "
                "declare how the ranks' values come together, `combines` in the layer or the task: "
                f"{join(KINDS[:-1], 9)} (hvdkit/train/step/combine.py), or make it of the rows of "
                "all ranks (hvdkit.train.across.gather)"
            )
        return notes

    def refuse_draws(self, names: Sequence[str]) -> None:
        """Raises ValueError for state that ranks change otherwise, as each draws for itself."""
        raise ValueError(
            f"the forward pass changes {join(names)} by random numbers, which each rank draws for "
            "itself: declare how the ranks' values come together, `combines` in the layer or the "
            f"task: {join(KINDS[:-1], 9)} (hvdkit/train/step/combine.py), or draw them alike on "
            "all ranks, with a generator of a class of your own, "
            "class SharedSeeds(keras.random.SeedGenerator)"
        )


def _seeds(state: State) -> list[tf.Variable]:
    return [raw(generator.state) for generator in state.task_state.generators]


def _rule(declared: Any, name: str) -> Rule:
    rule = Rule(declared) if isinstance(declared, str) else Rule(*declared)
    if rule.kind not in KINDS:
        raise ValueError(
            f"{name} combines by {declared!r}: the rules are {', '.join(KINDS)}"
        )
    return rule


def check_micro_batches(changed: Sequence[StateChange], steps: int) -> None:
    for change in changed:
        if change.rule.kind == "concatenate" and steps > 1:
            raise ValueError(
                f"--accumulation_steps={steps} would put the rows of {change.variable.name} in "
                "another order: leave it out"
            )


def joined(start: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """A queue with new rows at its end."""
    return tf.concat([start, rows], 0)[-start.shape[0] :]


def settled(
    rule: Rule, before: tf.Tensor, value: tf.Tensor, *, steps: int
) -> tf.Tensor:
    """From a float64 total of means or sums, in a row, to the new value."""
    value = tf.reshape(value, before.shape)
    if rule.kind == "sum":
        value += rule.number**steps * tf.cast(before, tf.float64)
    if before.dtype.is_integer:
        value = tf.round(value)
    return tf.cast(value, before.dtype)


def to_ordered(rule: Rule, value: tf.Tensor) -> tf.Tensor:
    """int64 numbers of a value's size: the largest one is the rule's choice, to the last bit.

    float64 would round whole numbers above 2**53, such as hashes.
    """
    if value.dtype.is_floating:
        numbers = _in_order(tf.bitcast(tf.cast(value, tf.float64), tf.int64))
    else:
        numbers = tf.cast(value, tf.int64)
    return tf.bitwise.invert(numbers) if rule.kind == "min" else numbers


def from_ordered(rule: Rule, before: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """The value that `to_ordered` made numbers of, which may be in a row."""
    numbers = tf.reshape(numbers, before.shape)
    if rule.kind == "min":
        numbers = tf.bitwise.invert(numbers)
    if before.dtype.is_floating:
        numbers = tf.bitcast(_in_order(numbers), tf.float64)
    return tf.cast(numbers, before.dtype)


def _in_order(bits: tf.Tensor) -> tf.Tensor:
    """Bits of doubles as whole numbers in their order, and back.

    Of two negative doubles the bits of the smaller one are the larger.
    """
    reversed_bits = tf.bitwise.bitwise_xor(bits, tf.constant(tf.int64.max, tf.int64))
    return tf.where(bits < 0, reversed_bits, bits)


def split_by_change(
    changed: Sequence[StateChange], flat: tf.Tensor
) -> Iterator[tuple[StateChange, tf.Tensor]]:
    """Each with its part of all elements in a row."""
    sizes = [change.variable.shape.num_elements() for change in changed]
    return zip(changed, tf.split(flat, sizes))
