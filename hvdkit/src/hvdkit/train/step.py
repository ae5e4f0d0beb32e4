"""One training step on all ranks: forward and backward, one reduction, unscale, judge, apply.

train.py writes the step with its own tape (reduction.TEMPLATE_STEP); `Step` has its parts.

The run's loss is sum(losses * weights) / sum(weights), both sums over the global batch. The ranks
add up the second sum while the backward pass runs. So each number is divided where it is known:

  backward pass, on each rank:  gradient of  loss_sum * scale / positions
  reduction:                    sum over ranks
  after it:                     * positions / (count * scale)

with `loss_sum` and `count` the sums of losses * weights and of weights, `positions` the size of
`losses` in the global batch (by its shape; it keeps the numbers of the backward pass small, for
float16) and `scale` the loss scale, 1 but for float16. The result is the gradient of
sum(losses * weights) / sum(weights), however uneven the ranks' shares. Weights are constants in it.

A loss of several terms is the sum of theirs, each with sums, count and positions of its own. Losses
that the model adds by itself are not divided by a count. Where there is more than one term or the
model adds losses, the backward pass waits for all ranks' sums and takes the whole loss at once.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import tensorflow as tf

from hvdkit.ranks import agreement
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.stragglers import moment, own_part
from hvdkit.ranks.world import World, raw
from hvdkit.settings import Settings
from hvdkit.stop import WRONG_USE, Stop
from hvdkit.train import (
    across,
    batch_norm,
    combine,
    dropout,
    graph_checks,
    objective,
    reduction,
    schedule,
    task_checks,
    updating,
    virtual,
)
from hvdkit.train import gradients as gradients_lib
from hvdkit.train import losses as losses_lib
from hvdkit.train import optimizer as optimizers
from hvdkit.train.gradients import Reduced
from hvdkit.train.state import State
from hvdkit.train.task import Example, Task

Result = Mapping[str, tf.Tensor]  # what a step returns
Losses = Callable[[Example], Any]  # returns what a task's `loss` does
_RETURNS = (
    "a step calls run.update(gradients) once and returns what it returns; "
    "entries that it adds have names of their own"
)


@dataclasses.dataclass
class _Traced:
    """A step while it is traced."""

    votes: tf.Tensor
    before: list[tf.Tensor]  # what is not trained, as it was before the forward pass
    terms: tuple[str, ...] = ()  # names of the loss's terms, once they are known
    adds_losses: bool = False  # whether the model adds any to them
    known: Reduced | None = None  # once the loss is: all but the gradients
    factor: tf.Tensor | None = None  # from summed gradients to those of the mean
    updated: list[Result] = dataclasses.field(default_factory=list)  # what `update` returned


class Step:
    """The parts of a step, for the function that `trace` traces.

    Attributes:
      weights: the model's trainable variables, as tf.Variables, in their order.
      reduction: what hvd.DistributedGradientTape takes besides `op`.
      special: why only the engine's step will do; "" where any does.
    """

    def __init__(
        self, settings: Settings, world: World, task: Task, *, state: State, spec: Any
    ) -> None:
        """`spec`: of a batch, nested tensors [micro-batches, samples, ...]."""
        self._settings, self._world, self._task = settings, world, task
        self._state, self._spec = state, spec
        self._variables = state.model.trainable_variables
        self.weights = [raw(v) for v in self._variables]
        self.reduction = reduction.arguments(settings)
        self.special = reduction.needs_own_step(settings, self._variables)
        # What a forward pass in training changes: moving statistics, seeds, a layer's counters.
        self._untrained = state.of_forward
        self._combiner = combine.Combiner(world, settings, state, task=task, spec=spec)
        self._losses: dict[Losses | None, None] = {}  # each that run.loss was given
        with world.fail_together("making the schedule"), task_checks.user_code_errors("schedule"):
            self._rate = schedule.of_run(task, settings, world.size)
        steps = settings.accumulation_steps
        self._micro_batches = gradients_lib.MicroBatches(steps, self._variables, jit=settings.jit)
        across.used = False
        why = "computes a batch in parts, one after the other: leave it out"
        refused = f"--accumulation_steps={steps} {why}" if steps > 1 else ""
        self._rows = across.Batch(settings.global_batch_size, world.rank, world.size, refused)
        self._connected: list[bool] = []  # by variable: whether it has a gradient; once traced
        self._traced: _Traced | None = None

    # ---- what a step calls ------------------------------------------------------------------

    def loss(self, batch: Example, losses: Losses | None = None) -> tf.Tensor:
        """This rank's part of the loss, times a factor that `update` takes out; scalar.

        Call it once a step, inside the tape. It includes accumulation, loss scale and the division
        by positions: take only its gradient. A penalty goes into `losses`.

        Args:
          batch: nested tensors [micro-batches, samples, ...].
          losses: micro-batch -> what a task's `loss` returns; by default the task's, of the model
            called in training.
        """
        step = self._step("run.loss")
        if step.known is not None:
            raise ValueError("run.loss is called once a step: add two losses in run.loss(batch, f)")
        given, own = (tf.nest.flatten(part)[0].shape[:2] for part in (batch, self._spec))
        if tuple(given) != tuple(own):
            raise ValueError(
                f"run.loss takes as many samples as the step's batch, {list(own)}, not "
                f"{list(given)}: for two views of a sample return the mean of their losses"
            )
        self._losses[losses] = None
        targets, sums = self._micro_batches.loss(partial(self._forward, losses=losses), batch)
        own_loss = tf.reduce_sum(gradients_lib.means_of(sums), keepdims=True)
        # Alone, nothing is exchanged nor timed: a GPU may run behind the host.
        alone = self._world.size == 1
        ready = tf.zeros([], tf.float64) if alone else own_part(sums)
        # One collective for both: constant size on any number of ranks. Its name holds those of the
        # terms, so that ranks with other terms are told.
        totals = tf.stop_gradient(tf.concat([sums, step.votes], 0))
        name = ".".join(filter(None, ["step.totals", *step.terms]))
        if not alone:
            totals = reduction.totals(totals, self._settings, self._variables, name=name)
        totals, all_votes = tf.split(totals, [sums.shape[0], agreement.NUM_VOTES])
        step.known = Reduced(totals, all_votes, losses=own_loss, ready=ready)
        to_means = tf.unstack(tf.stop_gradient(gradients_lib.to_means(totals)))
        scale = self._state.loss_scale.read(tf.float64)
        if len(targets) == 1:
            step.factor = to_means[0] / scale
            return targets[0]
        step.factor = 1 / scale
        means = [target * tf.cast(to, target.dtype) for target, to in zip(targets, to_means)]
        return tf.add_n([*means, *targets[len(means) :]])

    def update(self, gradients: list[tf.Tensor | tf.IndexedSlices | None]) -> Result:
        """Applies gradients of `loss`, summed over ranks; call it once a step, return its result.

        In order: unscale, judge whether all is finite, L2, clip by the global norm, set the rate of
        the schedule, apply; alike on every rank. A step that is not finite leaves no trace.
        """
        step = self._step("run.update")
        if step.known is None:
            raise ValueError("run.update comes after run.loss(batch), in the same step")
        gradients = list(gradients)
        graph_checks.check_gradients(gradients, self._variables)
        self._combiner.over_ranks(step.before)
        grads = gradients_lib.unscale(gradients, step.factor, self._variables)
        return self.apply(step.known._replace(grads=grads))

    def apply(self, found: Reduced) -> Result:
        """From means over the global batch to updated weights and the step's figures."""
        settings, state, traced = self._settings, self._state, self._step("run.update")
        if all(gradient is None for gradient in found.grads):
            raise ValueError(reduction.NO_GRADIENTS)
        scale = state.loss_scale.read(tf.float64)
        terms = gradients_lib.of_terms(found.sums)
        means, loss_sum = gradients_lib.means_of(found.sums), tf.reduce_sum(terms[:, 0])
        self._connected = [g is not None for g in found.grads]
        layers = gradients_lib.layer_figures(found.grads) if settings.log_gradients else None
        rate = self._rate(state.step)
        numbers = tf.stack([loss_sum, tf.reduce_sum(terms[:, 1]), rate])
        sound = tf.reduce_all(tf.math.is_finite(numbers)) & (rate >= 0)
        readable = found.votes[agreement.DATA_FAILED] == 0
        known = [g for g in found.grads if g is not None]
        norm, finite = self._end(updating.Offered(known, rate, sound, readable))
        state.advance(finite, readable)
        result = {"step": state.step.read_value(), "loss": tf.reduce_sum(means), "lr": rate}
        result |= {"grad_norm": norm, "finite": finite, "loss_scale": scale, "layers": layers}
        result |= {"votes": found.votes, "losses": found.losses}
        result["skipped_in_a_row"] = state.loss_scale.skipped_in_a_row.read_value()
        if self._world.size > 1:
            result["moments"] = tf.stack([found.ready, moment(norm)])
        result |= {} if found.faults is None else {"faults": found.faults}
        result |= {"keras_loss": found.sums[-1]} if traced.adds_losses else {}
        if any(traced.terms):
            result["terms"] = dict(zip(traced.terms, tf.unstack(means)))
        result["refused_weights"] = dict(zip(traced.terms, tf.unstack(terms[:, 3:])))
        traced.updated.append(dict(result))  # a copy: the step may change its own
        return result

    def _end(self, offered: updating.Offered) -> tuple[tf.Tensor, tf.Tensor]:
        undo = list(zip(self._untrained, self._step("run.update").before))
        if not world_lib.gpu():
            return updating.by_branch(self._judged, undo, offered)
        trained = [raw(v) for v in [*self._variables, *self._state.optimizer.variables]]
        return updating.by_choice(self._judged, undo, offered, trained=trained)

    def _judged(
        self, grads: list[tf.Tensor], rate: tf.Tensor, sound: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, Callable[[], None]]:
        """As updating.py describes it."""
        optimizer = self._state.optimizer
        variables = [v for v, there in zip(self._variables, self._connected) if there]
        l2, most = optimizers.l2_weight(self._settings, optimizer), self._settings.clip_norm
        grads, norm = gradients_lib.finish(grads, variables, l2=l2, clip_norm=most)
        optimizer.learning_rate.assign(tf.cast(rate, optimizer.learning_rate.dtype))
        return norm, tf.math.is_finite(norm) & sound, lambda: optimizer.apply(grads, variables)

    # ---- the step as one graph --------------------------------------------------------------

    def trace(self, function: Callable[[Example], Result]) -> Callable[..., Result]:
        """`function` as one graph of (batch, votes), traced once; Stop where ranks trace others."""
        signature = [self._spec, tf.TensorSpec([agreement.NUM_VOTES], tf.float64)]

        @tf.function(input_signature=signature, autograph=False)
        def train_step(batch: Example, own_votes: tf.Tensor) -> Result:
            graph = tf.compat.v1.get_default_graph()
            self._traced = _Traced(own_votes, [v.read_value() for v in self._untrained])
            try:
                outside = self._rows._replace(refused="it belongs into the losses of run.loss")
                with reduction.refuse_empty_group(self._settings), across.training(outside):
                    result = function(batch)
                updated = self._traced.updated
                if len(updated) != 1 or not isinstance(result, Mapping):
                    raise ValueError(_RETURNS)
                for name, value in updated[0].items():
                    # In a tf.function inside the step they are tensors of another graph.
                    here = getattr(value, "graph", graph) is graph
                    if name not in result or (here and result[name] is not value):
                        raise ValueError(f"{_RETURNS}; this one leaves out or replaces {name!r}")
            finally:
                self._traced = None
            return result

        with self._world.fail_together("making the step"), task_checks.user_code_errors("the step"):
            whole = train_step.get_concrete_function()
            self._check(whole.graph)
        agreement.check_gradients(self._world, self._variables, self._connected)
        agreement.check_collectives(self._world, whole)
        return whole  # not train_step, which takes half a millisecond to find it again

    def own_step(self) -> Callable[[Example], Result] | None:
        """The engine's step, where the settings need it; else None."""
        settings = self._settings
        if settings.virtual_ranks:
            how = {"forward": self._forward, "micro_batches": self._micro_batches}
            how["rules"] = self._combiner.rules
            passes = virtual.Passes(settings, self._world, state=self._state, **how)
            return lambda batch: self.apply(passes.reduce(batch, self._step("run.loss").votes))
        if not self.special:
            return None

        def step(batch: Example) -> Result:
            with tf.GradientTape() as tape:
                loss = self.loss(batch)
            own = tape.gradient(loss, self.weights)
            return self.update(reduction.rank_sums(own, settings, self._variables))

        return step

    def _forward(
        self, micro: Example, losses: Losses | None = None, turn: across.Turn | None = None
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Of a micro-batch: scalars to differentiate, and its sums (`Forward`)."""
        settings, model = self._settings, self._state.model
        samples = tf.nest.flatten(micro)[0].shape[0]  # of this rank in a micro-batch
        graph = tf.compat.v1.get_default_graph()
        before = {op.name for op in graph.get_operations()}
        rows = self._traced and self._rows._replace(turn=turn)
        with tf.GradientTape() as tape, across.training(rows):
            with losses_lib.mean_activity_losses(model, samples):
                if losses:
                    found = losses(micro)
                else:
                    with task_checks.user_code_errors("the model, called in training,"):
                        outputs = model(micro["inputs"], training=True)
            added = losses_lib.added_loss(model)  # now: `loss` may call the model once more
            if losses:
                terms = objective.terms(found, samples)
                objective.check_independent(losses, micro, made=terms)
            else:
                terms = objective.loss(self._task, outputs, micro["targets"], samples=samples)
        if self._traced:
            self._traced.terms, self._traced.adds_losses = tuple(terms), added is not None
        graph_checks.check_collectives(graph, "the model or the task's loss", before)
        self._combiner.look(graph)
        graph_checks.check_weights(tape, [weights for _, weights in terms.values()], self.weights)
        targets, sums = [], []
        for each, weights in terms.values():
            # Weight 0 leaves a position out of the sum, also one whose loss is no number.
            loss_sum = tf.reduce_sum(tf.math.multiply_no_nan(each, weights))
            # By shape, not by tf.size: what a rank's own data leave out or pad must not change it.
            per_sample = math.prod(size or 1 for size in each.shape[1:])
            scale = self._state.loss_scale.read(each.dtype)
            targets.append(loss_sum * scale / (per_sample * settings.global_batch_size))
            count, *refused = objective.count(weights)
            sums += [loss_sum, count, samples * per_sample, *refused]
        if added is not None:
            added = tf.cast(added, each.dtype) * (samples / settings.global_batch_size)
            targets.append(added * scale)
        sums.append(0.0 if added is None else added)
        return targets, tf.stack([tf.cast(x, tf.float64) for x in sums])

    @property
    def own_losses(self) -> bool:
        """Whether run.loss was given losses in place of the task's."""
        return any(self._losses)

    def try_state(self, sample: Callable[..., Example]) -> None:
        """Stop, on all ranks, where ranks would change state in ways of their own.

        And where the losses that run.loss was given mix samples; the task's are tried in evaluation
        (`Evaluator.check_loss`), in which batch norm and dropout do nothing.
        """
        model, near = self._state.model, objective.nearness(self._settings)
        varies = batch_norm.normalizing(model) or dropout.drawing_layers(model) or across.used
        divided = objective.divides(self._settings, self._world.size)
        how = {"state": self._state, "config": self._settings}
        for losses in self._losses or [None]:  # virtual ranks do not come to `loss`
            forward = partial(self._forward, losses=losses)
            passes = lambda batch, f=forward: f(batch)[1]  # noqa: E731
            self._combiner.try_out(passes, sample, near=0 if varies else near)
            if losses and divided and not varies:
                with self._world.fail_together("trying the loss"):
                    tried = [sample(place) for place in range(2)]
                    objective.check_own("run.loss(batch, losses): ", forward, tried, **how)
        # Targets of mixed samples come to the loss in training only; the model is at rest here.
        tries = divided and not self.own_losses and not across.used
        if getattr(self._task, "mixes", False) and tries:
            rest = lambda x: self._task.loss(model(x["inputs"], training=False), x["targets"])  # noqa: E731
            forward = partial(self._forward, losses=rest)
            with self._world.fail_together("trying the loss"):
                tried = [sample(place, draw=place) for place in range(4)]
                objective.check_own("the task's ", forward, tried, **how)

    def _check(self, graph: tf.Graph) -> None:
        optimizers.check_trainable(self._state.optimizer, self._state.model)
        graph_checks.check_state(graph, self._state, "the step", trains=True)
        use = "use keras.random with a keras.random.SeedGenerator that the layer makes in __init__"
        graph_checks.check_draws(graph, "the step", use)
        graph_checks.check_sums(graph, self._world.size)
        graph_checks.check_compiles(self._micro_batches.compiled)

    def _step(self, caller: str) -> _Traced:
        if self._traced is None:
            raise ValueError(f"{caller} belongs in the function that run.function wraps")
        return self._traced


def direct_call(traced: tf.types.experimental.ConcreteFunction, spec: Any) -> Callable[..., Result]:
    """`traced` of (batch, votes), for batches as `spec` says; Stop for others.

    A ConcreteFunction binds its arguments in Python at each call, a quarter of a small step; what
    is called here instead is no public part of TensorFlow.
    """
    forms = [(form.dtype, form.shape) for form in tf.nest.flatten(spec)]

    def call(batch: Example, votes: tf.Tensor) -> Result:
        try:
            tf.nest.assert_same_structure(batch, spec)
            given = zip(tf.nest.flatten(batch), forms)
            # Not tf.is_tensor: it takes variables and ragged tensors for tensors.
            parts = [
                p if isinstance(p, tf.Tensor) else tf.convert_to_tensor(p, f[0]) for p, f in given
            ]
        except (TypeError, ValueError):
            parts = []
        if [(part.dtype, part.shape) for part in parts] != forms:
            raise Stop(WRONG_USE, f"train.py: step(batch) takes what run.batches() gives: {spec}")
        return traced.inference_fn.call_preflattened([*parts, votes, *traced.captured_inputs])

    return call
