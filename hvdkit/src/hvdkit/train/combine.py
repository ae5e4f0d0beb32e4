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

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvdkit.logs import join
from hvdkit.ranks.world import World, raw, say, weights_sha256
from hvdkit.settings import Settings
from hvdkit.stop import WRONG_USE, Stop
from hvdkit.train import reduction, task_checks
from hvdkit.train.batch_norm import moving_ids
from hvdkit.train.graph_checks import assigned_handles
from hvdkit.train.state import State, unchanged

KINDS = ("mean", "sum", "max", "min", "concatenate", "same")
_KNOWN = {
    keras.layers.BatchNormalization: {"moving_mean": "mean", "moving_variance": "mean"},
    keras.layers.SpectralNormalization: "same",
}


class Rule(NamedTuple):
    kind: str
    number: float = 1.0  # sum: what one update keeps of the old value; concatenate: rows a sample


SAME = Rule("same")  # also of what has none: `Combiner.try_out` looks


class Changed(NamedTuple):
    variable: tf.Variable
    rule: Rule
    before: tf.Tensor  # its value at the start of the step


def rules(state: State, task: Any) -> dict[int, Rule]:
    """Rules by id of the tf.Variable. Raises ValueError for one that is malformed or unused."""
    declared = getattr(task, "combines", {})
    found = {}
    for layer in state.held.layers:
        known = next((r for kind, r in _KNOWN.items() if isinstance(layer, kind)), None)
        of_layer = declared.get(type(layer), getattr(layer, "combines", known))
        for variable in [*layer._trainable_variables, *layer._non_trainable_variables]:
            named = isinstance(of_layer, Mapping)
            if rule := of_layer.get(variable.name) if named else of_layer:
                found[id(raw(variable))] = _rule(rule, variable.name)
    found |= {id(v): SAME for v in _seeds(state)}
    for name, variable in state.variables.items():
        chosen = [r for key, r in declared.items() if _matches(name, key)]
        if rule := next(iter(chosen), getattr(variable, "combines", None)):
            found[id(raw(variable))] = _rule(rule, name)
    for key in declared:
        if isinstance(key, str) and not any(_matches(name, key) for name in state.variables):
            raise ValueError(f"the task's combines: no variable's name is like {key!r}")
    return found


class Combiner:
    """Of one step: what its forward pass changes, and how that comes together."""

    def __init__(
        self, world: World, settings: Settings, state: State, *, task: Any, spec: Any
    ) -> None:
        """`spec`: of this rank's batch. Stop, on all ranks, where a rule is malformed."""
        with world.fail_together("combining state"):
            self.rules = rules(state, task)
        self._world, self._state, self._virtual = world, state, settings.virtual_ranks
        self._steps = settings.accumulation_steps
        self._samples = tf.nest.flatten(spec)[0].shape[1]
        self._share = self._samples * self._steps / settings.global_batch_size
        self._device = {"device_dense": reduction.device(settings)}
        self._assigned: dict[int, tf.Tensor] = {}  # handles
        self._seeds = {id(v) for v in _seeds(state)}

    def look(self, graph: tf.Graph) -> None:
        """Learns what a forward pass in this graph assigns; once it is traced."""
        self._assigned |= {id(handle): handle for handle in assigned_handles(graph)}

    def over_ranks(self, before: Sequence[tf.Tensor]) -> None:
        """Sets state with a rule to what the ranks' values make; inside the step, on every rank.

        `before`: `state.of_forward` at the start. Moving statistics have a sync of their own.
        """
        if self._world.size == 1:
            return
        synced = moving_ids(self._state.model)
        changed = [
            Changed(v, self.rules[id(v)], start)
            for v, start in zip(self._state.of_forward, before)
            if id(v) in self.rules and id(v.handle) in self._assigned and id(v) not in synced
        ]
        check_micro_batches(changed, self._steps)
        sums, most, rows = [], [], []
        for variable, rule, start in changed:
            value, start = (tf.cast(t, tf.float64) for t in (variable.read_value(), start))
            if rule.kind == "mean":
                sums.append(value * self._share)
            elif rule.kind == "sum":
                sums.append(value - rule.number**self._steps * start)
            elif rule.kind in ("max", "min"):
                most.append(value if rule.kind == "max" else -value)
            elif rule.kind == "concatenate":
                own = variable.read_value()[-self._samples * int(rule.number) :]
                rows.append(hvd.allgather(own, name=f"state.rows.{len(rows)}"))
        added = iter(_reduced(sums, op=hvd.Sum, name="state.sums", **self._device))
        largest = iter(_reduced(most, op=hvd.Max, name="state.most", **self._device))
        for variable, rule, start in changed:
            if rule.kind == "concatenate":
                variable.assign(joined(start, rows.pop(0)))
            elif rule.kind != "same":
                value = next(largest if rule.kind in ("max", "min") else added)
                variable.assign(settled(rule, start, value, steps=self._steps))

    def try_out(
        self, forward: Callable[[Any], tf.Tensor], sample: Callable[[int], Any], *, near: float = 0
    ) -> None:
        """Forward passes on two samples, alone and together, others on each rank; state goes back.

        What has no rule, or `same`, must end alike in all; what has another, as the rule says.

        `near`: relative difference that a rule's value may have; 0: rules are not tried, as where a
        sample's outputs depend on its place or others. Raises Stop, on all ranks, at a difference.
        """
        world = self._world
        names = {id(raw(v)): name for name, v in self._state.variables.items()}
        synced = moving_ids(self._state.model)
        changed = [v for v in self._state.of_forward if id(v.handle) in self._assigned]
        changed = [v for v in changed if id(v) not in synced | self._seeds]
        ruled = [v for v in changed if self.rules.get(id(v), SAME).kind != "same"]
        loose = [v for v in changed if self.rules.get(id(v), SAME).kind == "same"]
        if not (loose or (near and ruled)) or (world.size == 1 and not self._virtual):
            return
        with world.fail_together("trying the state"), task_checks.user_code_errors("the model"):
            read = [sample(place) for place in (2 * world.rank, 2 * world.rank + 1)]
            found = self._values(forward, read, loose + ruled)
        own = {names[id(v)]: [weights_sha256([value]) for value in found[id(v)]] for v in loose}
        everyone = world.gather_alike(own, "state.tried")
        odd = [n for n in own if len({value for theirs in everyone for value in theirs[n]}) > 1]
        if odd:
            raise Stop(
                WRONG_USE,
                f"the forward pass changes {join(odd)} by the samples of a rank's share: declare "
                "how the ranks' values come together, `combines` in the layer or in the task: "
                f"{join(KINDS[:-1], 9)} (hvdkit/train/combine.py)",
            )
        with world.fail_together("trying the state"):
            for variable in ruled if near else []:
                rule = self.rules[id(variable)]
                *alone, together = found[id(variable)]
                wanted = combined(rule, variable, alone)
                if np.allclose(together, wanted, near, near, equal_nan=True):
                    continue
                if rule.kind == "mean":
                    say(
                        world,
                        f"note: {names[id(variable)]} is no mean of its samples (as a variance is "
                        "none), so its mean over ranks depends on their number",
                    )
                else:
                    raise ValueError(
                        f"{names[id(variable)]} combines by {rule.kind!r}, which makes another "
                        "value of what two samples give alone than a batch of both gives: declare "
                        "another rule, or change the layer (hvdkit/train/combine.py)"
                    )

    def _values(
        self, forward: Callable[[Any], tf.Tensor], read: list[Any], wanted: list[tf.Variable]
    ) -> dict[int, list[tf.Tensor]]:
        """Of each variable wanted: its values after the first, the second, both samples."""
        found: dict[int, list[tf.Tensor]] = {id(v): [] for v in wanted}
        state = [*map(raw, self._state.model.trainable_variables), *self._state.of_forward]
        seeds = [v for v in state if id(v) in self._seeds]
        others = [v for v in state if id(v) not in self._seeds]
        with unchanged(seeds):  # in the end: a share draws others than another
            for chosen in (read[:1], read[1:], read):
                batch = tf.nest.map_structure(lambda *parts: tf.stack(parts), *chosen)
                with unchanged(others):
                    tf.function(partial(forward, batch), autograph=False).get_concrete_function()()
                    for variable in wanted:
                        found[id(variable)].append(tf.identity(variable))
        return found


def combined(rule: Rule, before: tf.Tensor, values: Sequence[tf.Tensor]) -> tf.Tensor:
    """What the rule makes of the values after one sample each, all from `before`."""
    if rule.kind == "concatenate":
        return joined(before, tf.concat([v[-int(rule.number) :] for v in values], 0))
    wide = [tf.cast(v, tf.float64) for v in values]
    if rule.kind == "sum":
        start = rule.number * tf.cast(before, tf.float64)
        return start + tf.add_n([v - start for v in wide])
    reduce = {"mean": tf.reduce_mean, "max": tf.reduce_max, "min": tf.reduce_min}[rule.kind]
    return reduce(tf.stack(wide), 0)


def _seeds(state: State) -> list[tf.Variable]:
    return [raw(g.state) for layer in state.held.layers for g in layer._seed_generators]


def _matches(name: str, key: Any) -> bool:
    return isinstance(key, str) and fnmatch.fnmatchcase(name, key)


def _rule(given: Any, name: str) -> Rule:
    rule = Rule(given) if isinstance(given, str) else Rule(*given)
    if rule.kind not in KINDS:
        raise ValueError(f"{name} combines by {given!r}: the rules are {', '.join(KINDS)}")
    return rule


def check_micro_batches(changed: Sequence[Changed], steps: int) -> None:
    queues = [c.variable.name for c in changed if c.rule.kind == "concatenate"]
    if queues and steps > 1:
        raise ValueError(
            f"--accumulation_steps={steps} would put the rows of {queues[0]} in another order: "
            "leave it out"
        )


def joined(start: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """A queue with new rows at its end."""
    return tf.concat([start, rows], 0)[-start.shape[0] :]


def settled(rule: Rule, before: tf.Tensor, value: tf.Tensor, *, steps: int) -> tf.Tensor:
    """From a float64 total, in a row, to the new value."""
    value = tf.reshape(value, before.shape)
    if rule.kind == "sum":
        value += rule.number**steps * tf.cast(before, tf.float64)
    value = -value if rule.kind == "min" else value
    return tf.cast(tf.round(value) if before.dtype.is_integer else value, before.dtype)


def _reduced(values: Sequence[tf.Tensor], **how: Any) -> list[tf.Tensor]:
    """One collective for all; none where there is nothing."""
    if not values:
        return []
    flat = hvd.allreduce(tf.concat([tf.reshape(v, [-1]) for v in values], 0), **how)
    return tf.split(flat, [v.shape.num_elements() for v in values])


def parts(changed: Sequence[Changed], flat: tf.Tensor) -> Iterator[tuple[Changed, tf.Tensor]]:
    """Each with its part of all elements in a row."""
    return zip(changed, tf.split(flat, [c.variable.shape.num_elements() for c in changed]))
