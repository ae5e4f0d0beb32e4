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

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import tensorflow as tf

from hvdkit.ranks import agreement
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.stragglers import moment, own_part
from hvdkit.ranks.world import World, raw, say
from hvdkit.settings import Settings
from hvdkit.stop import WRONG_USE, Stop
from hvdkit.train import (
    across,
    combine,
    graph_checks,
    objective,
    reduction,
    schedule,
    task_checks,
    trial,
    updating,
    virtual,
)
from hvdkit.train import gradients as gradients_lib
from hvdkit.train import losses as losses_lib
from hvdkit.train import optimizer as optimizers
from hvdkit.train.gradients import StepTotals
from hvdkit.train.state import State, leave_zero, unchanged
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
    before: dict[int, tf.Tensor]  # values at the start of the step, by the variable's id
    terms: tuple[str, ...] = ()  # names of the first loss's terms, once they are known
    adds_losses: bool = False  # whether the model adds any to them
    known: StepTotals | None = None  # once a loss is: all but the gradients, of the first one
    factor: tf.Tensor | None = None  # from summed gradients to those of the mean
    alone: bool = False  # whether `loss` gave the loss, which may be called once
    sums: list[tf.Tensor] = dataclasses.field(default_factory=list)  # of each loss, on this rank
    means: list[tf.Tensor | None] = dataclasses.field(default_factory=list)  # to update by
    updated: list[Result] = dataclasses.field(default_factory=list)  # what `update` returned
    of_engine: list[tuple[tf.Graph, range]] = dataclasses.field(default_factory=list)  # operations


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
        self._settings = settings
        self._world = world
        self._task = task
        self._state = state
        self._spec = spec
        self._variables = state.model.trainable_variables
        self.weights = [raw(v) for v in self._variables]
        self.reduction = reduction.arguments(settings)
        self.special = reduction.needs_own_step(settings, self._variables)
        # What a forward pass in training changes: moving statistics, seeds, a layer's counters.
        self._untrained = state.of_forward
        # What a step's function may change by itself, outside of forward passes.
        self._guarded = [*self.weights, *state.untrained]
        self._combiner = combine.Combiner(world, settings, state, task=task, spec=spec)
        self.own_losses = False  # whether run.loss was given losses in place of the task's
        with world.fail_together("making the schedule"):
            self._rate = schedule.of_run(task, settings, world.size, plateau=state.plateau)
        steps = settings.accumulation_steps
        self._micro_batches = gradients_lib.MicroBatches(steps, self._variables, jit=settings.jit)
        across.used = False
        refused = ""
        if steps > 1:
            refused = (
                f"--accumulation_steps={steps} computes a batch in parts, one after the other: "
                "leave it out"
            )
        self._rows = across.Batch(settings.global_batch_size, world.rank, world.size, refused)
        self._connected: list[bool] = []  # by variable: whether it has a gradient; once traced
        self._traced: _Traced | None = None
        self._changed: list[tf.Variable] = []  # what the newest function itself changes
        # What `trace` was given, and what it changes outside of forward passes and updates.
        self._functions: list[tuple[Callable[[Example], Result], list[tf.Variable]]] = []
        self._stand_in: Step | None = None  # a simulated rank, in a trial
        self._is_tried = False  # whether this is one
        self._terms: tuple[str, ...] = ()  # names of the newest loss's terms
        self._draws_by_place = False  # see graph_checks.draws_by_place; once traced
        self._adds_of_samples = False  # whether the model adds losses of its samples; once traced
        self.of_template = False  # whether make_step is the template's

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
        if self._stand_in:
            return self._stand_in.loss(batch, losses)
        step = self._step("run.loss")
        if step.known is not None:
            raise ValueError(
                "run.loss is called once a step: add two losses in run.loss(batch, f); for "
                "gradients of several by themselves there is run.losses"
            )
        step.alone = True
        targets, to_means = self._targets(batch, losses)
        scale = self._state.loss_scale.read(tf.float64)
        if len(targets) == 1:
            step.factor = to_means[0] / scale
            return targets[0]
        step.factor = 1 / scale
        return tf.add_n(_as_means(targets, to_means))

    def losses(self, batch: Example, losses: Losses | None = None) -> dict[str, tf.Tensor]:
        """This rank's part of each term of the loss, a mean over the global batch; scalars.

        By the term's name: "loss" where it has none, "keras_loss" for what the model adds. As often
        as the step needs, inside a tape, and not beside `loss`. Gradients of them, summed over
        ranks, are those of the means, times the loss scale, which `update` takes out: it takes
        what they are combined to. The step's figures are those of the first call. It is slower
        than `loss`, as the backward pass waits for the sums of all ranks.
        """
        if self._stand_in:
            return self._stand_in.losses(batch, losses)
        step = self._step("run.losses")
        if step.alone:
            raise ValueError("run.losses and run.loss do not go together: call run.losses only")
        targets, to_means = self._targets(batch, losses)
        step.factor = 1 / self._state.loss_scale.read(tf.float64)
        names = [name or "loss" for name in self._terms]
        return dict(zip([*names, "keras_loss"], _as_means(targets, to_means)))

    def _targets(
        self, batch: Example, losses: Losses | None
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Of each term what to differentiate, and the factor that makes its sum a mean."""
        step = self._step("run.loss")
        given, own = (tf.nest.flatten(part)[0].shape[:2] for part in (batch, self._spec))
        if tuple(given) != tuple(own):
            raise ValueError(
                f"run.loss takes as many samples as the step's batch, {list(own)}, not "
                f"{list(given)}: for two views of a sample return the mean of their losses"
            )
        self.own_losses = self.own_losses or losses is not None
        with self._own_operations():
            forward = partial(self._forward, losses=losses)
            targets, sums = self._micro_batches.loss(forward, batch)
            step.sums.append(sums)
            own_loss = tf.reduce_sum(gradients_lib.means_of(sums), keepdims=True)
            # Alone, nothing is exchanged nor timed: a GPU may run behind the host.
            alone = self._world.size == 1
            untimed = alone or self._is_tried
            ready = tf.zeros([], tf.float64) if untimed else own_part(sums)
            # One collective for both: constant size on any number of ranks. Its name holds those of
            # the terms, so that ranks with other terms are told.
            totals = tf.stop_gradient(tf.concat([sums, step.votes], 0))
            name = ".".join(filter(None, ["step.totals", *self._terms]))
            if not alone:
                totals = reduction.totals(totals, self._settings, self._variables, name=name)
            totals, all_votes = tf.split(totals, [sums.shape[0], agreement.NUM_VOTES])
            if step.known is None:
                step.known = StepTotals(totals, all_votes, losses=own_loss, ready=ready)
                step.terms = self._terms
            to_means = tf.unstack(tf.stop_gradient(gradients_lib.to_means(totals)))
        return targets, to_means

    def update(self, gradients: list[tf.Tensor | tf.IndexedSlices | None]) -> Result:
        """Applies gradients of `loss`, summed over ranks; call it once a step, return its result.

        In order: unscale, judge whether all is finite, L2, clip by the global norm, set the rate of
        the schedule, apply; alike on every rank. A step that is not finite leaves no trace.
        """
        if self._stand_in:
            return self._stand_in.update(gradients)
        step = self._step("run.update")
        if step.known is None:
            raise ValueError("run.update comes after run.loss(batch), in the same step")
        gradients = list(gradients)
        graph_checks.check_gradients(gradients, self._variables)
        with self._own_operations():
            self._combiner.over_ranks(step.before)
            grads = gradients_lib.unscale(gradients, step.factor, self._variables)
            return self.apply(step.known._replace(grads=grads))

    def apply(self, found: StepTotals) -> Result:
        """From means over the global batch to updated weights and the step's figures."""
        settings = self._settings
        state = self._state
        traced = self._step("run.update")
        if all(gradient is None for gradient in found.grads):
            raise ValueError(reduction.NO_GRADIENTS)
        traced.means = list(found.grads)
        scale = state.loss_scale.read(tf.float64)
        terms = gradients_lib.of_terms(found.sums)
        means = gradients_lib.means_of(found.sums)
        loss_sum = tf.reduce_sum(terms[:, 0])
        self._connected = [g is not None for g in found.grads]
        looks = settings.log_gradients or settings.dry_run
        layers = gradients_lib.layer_figures(found.grads) if looks else None
        rate = self._rate(state.step)
        numbers = tf.stack([loss_sum, tf.reduce_sum(terms[:, 1]), rate])
        sound = tf.reduce_all(tf.math.is_finite(numbers)) & (rate >= 0)
        readable = found.votes[agreement.DATA_FAILED] == 0
        known = [g for g in found.grads if g is not None]
        norm, finite = self._end(updating.UpdateInputs(known, rate, sound, readable))
        state.advance(finite, readable)
        names = traced.terms or self._terms
        result = {
            "step": state.step.read_value(),
            "loss": tf.reduce_sum(means),
            "lr": rate,
            "grad_norm": norm,
            "finite": finite,
            "loss_scale": scale,
            "layers": layers,
            "votes": found.votes,
            "losses": found.losses,
            "skipped_in_a_row": state.loss_scale.skipped_in_a_row.read_value(),
            "refused_weights": dict(zip(names, tf.unstack(terms[:, 3:]))),
        }
        if self._world.size > 1:
            result["moments"] = tf.stack([found.ready, moment(norm)])
        if found.faults is not None:
            result["faults"] = found.faults
        if traced.adds_losses:
            result["keras_loss"] = found.sums[-1]
        if any(names):
            result["terms"] = dict(zip(names, tf.unstack(means)))
        traced.updated.append(dict(result))  # a copy: the step may change its own
        return result

    def _end(self, offered: updating.UpdateInputs) -> tuple[tf.Tensor, tf.Tensor]:
        before = self._step("run.update").before
        undo = [(v, before[id(v)]) for v in self._untrained]
        if self._is_tried or not world_lib.gpu():
            return updating.by_branch(self._judged, undo, offered)
        trained = [*self.weights, *self._state.updated]
        return updating.by_choice(self._judged, undo, offered, trained=trained)

    def _judged(
        self, grads: list[tf.Tensor], rate: tf.Tensor, sound: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, Callable[[], None]]:
        """As updating.py describes it."""
        optimizer = self._state.optimizer
        variables = [v for v, there in zip(self._variables, self._connected) if there]
        l2 = optimizers.l2_weight(self._settings, optimizer)
        most = self._settings.clip_norm
        grads, norm = gradients_lib.finish(grads, variables, l2=l2, clip_norm=most)
        optimizer.learning_rate.assign(tf.cast(rate, optimizer.learning_rate.dtype))

        def update() -> None:
            if self._is_tried:
                gradients_lib.descend(grads, variables)
            else:
                self._state.apply(grads, variables)

        return norm, tf.math.is_finite(norm) & sound, update

    # ---- the step as one graph --------------------------------------------------------------

    def trace(self, function: Callable[[Example], Result]) -> Callable[..., Result]:
        """`function` as one graph of (batch, votes), traced once; Stop where ranks trace others."""
        signature = [self._spec, tf.TensorSpec([agreement.NUM_VOTES], tf.float64)]

        @tf.function(input_signature=signature, autograph=False)
        def train_step(batch: Example, own_votes: tf.Tensor) -> Result:
            return self._called(function, batch, own_votes)[0]

        with self._world.fail_together("making the step"), task_checks.user_code_errors("the step"):
            whole = train_step.get_concrete_function()
            self._check(whole.graph)
        agreement.check_gradients(self._world, self._variables, self._connected)
        agreement.check_collectives(self._world, whole)
        tried = self._simple_step if self.special else function
        self._functions.append((tried, self._changed))
        self._draws_by_place |= graph_checks.draws_by_place(whole.graph)
        return whole  # not train_step, which takes half a millisecond to find it again

    def _called(
        self, function: Callable[[Example], Result], batch: Example, votes: tf.Tensor
    ) -> tuple[Result, _Traced]:
        """What the step's function returns, and what became known of it on the way."""
        graph = tf.compat.v1.get_default_graph()
        # Not read_value: its identity would run, where nothing uses it.
        before = {
            id(variable): tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
            for variable in self._guarded
        }
        self._traced = traced = _Traced(votes, before)
        try:
            outside = self._rows._replace(refused="it belongs into the losses of run.loss")
            with reduction.refuse_empty_group(self._settings), across.training(outside):
                result = function(batch)
            if len(traced.updated) != 1 or not isinstance(result, Mapping):
                raise ValueError(_RETURNS)
            for name, value in traced.updated[0].items():
                # In a tf.function inside the step they are tensors of another graph.
                here = getattr(value, "graph", graph) is graph
                if name not in result or (here and result[name] is not value):
                    raise ValueError(f"{_RETURNS}; this one leaves out or replaces {name!r}")
            if not self._is_tried:
                self._changed = self._changed_by_function(graph)
            self._combiner.over_ranks(traced.before, self._changed)
            self._leave_no_trace()
        finally:
            self._traced = None
        return result, traced

    @contextlib.contextmanager
    def _own_operations(self) -> Iterator[None]:
        """Operations that are made inside are the engine's, not the step function's."""
        graph = tf.compat.v1.get_default_graph()
        first = len(graph.get_operations())
        yield
        made = range(first, len(graph.get_operations()))
        self._step("run.loss").of_engine.append((graph, made))

    def _changed_by_function(self, graph: tf.Graph) -> list[tf.Variable]:
        """The variables that a traced step changes outside of forward passes and the update."""
        engines = {
            i for its, made in self._step("run.loss").of_engine if its is graph for i in made
        }
        operations = enumerate(graph.get_operations())
        own = [operation for place, operation in operations if place not in engines]
        handles = {id(handle) for handle in graph_checks.assigned_handles(graph, own)}
        return [v for v in self._guarded if id(v.handle) in handles]

    def _leave_no_trace(self) -> None:
        """What the step's function changed gets its old value back where nothing updates."""
        step = self._step("run.update")
        figures = step.updated[0]
        applied = figures["finite"] & (figures["votes"][agreement.DATA_FAILED] == 0)
        for variable in self._changed:
            old = step.before[id(variable)]
            variable.assign(tf.where(applied, variable.read_value(), old))

    def own_step(self) -> Callable[[Example], Result] | None:
        """The engine's step, where the settings need it; else None."""
        settings = self._settings
        if settings.virtual_ranks:
            passes = virtual.Passes(
                settings,
                self._world,
                state=self._state,
                forward=self._forward,
                micro_batches=self._micro_batches,
                rules=self._combiner.rules,
            )

            def step(batch: Example) -> Result:
                with self._own_operations():
                    return self.apply(passes.reduce(batch, self._step("run.loss").votes))

            return step
        return self._simple_step if self.special else None

    def _simple_step(self, batch: Example) -> Result:
        with tf.GradientTape() as tape:
            loss = self.loss(batch)
        own = tape.gradient(loss, self.weights)
        return self.update(reduction.rank_sums(own, self._settings, self._variables))

    def _forward(
        self, micro: Example, losses: Losses | None = None, turn: across.Turn | None = None
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Of a micro-batch: scalars to differentiate, and its sums (`Forward`)."""
        settings = self._settings
        model = self._state.model
        samples = tf.nest.flatten(micro)[0].shape[0]  # of this rank in a micro-batch
        graph = tf.compat.v1.get_default_graph()
        before = graph_checks.names(graph)
        rows = self._traced and self._rows._replace(turn=turn)
        with tf.GradientTape() as tape, across.training(rows):
            with losses_lib.wide_activity_losses(model):
                if losses:
                    found = losses(micro)
                else:
                    with task_checks.user_code_errors(
                        "the model, called in training,",
                        getattr(self._task, "build_model", None),
                    ):
                        outputs = model(micro["inputs"], training=True)
            added = losses_lib.added_loss(model)  # now: `loss` may call the model once more
            if losses:
                terms = objective.terms(found, samples)
                if not self._is_tried:
                    objective.check_independent(losses, micro, made=terms)
            else:
                terms = objective.loss(self._task, outputs, micro["targets"], samples=samples)
        self._terms = tuple(terms)
        self._adds_of_samples |= losses_lib.adds_of_samples(model)
        if self._traced:
            self._traced.adds_losses = added is not None
        graph_checks.check_collectives(graph, "the model or the task's loss", before)
        self._combiner.look(graph, before)
        graph_checks.check_weights(tape, [weights for _, weights in terms.values()], self.weights)
        targets = []
        sums = []
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

    def try_out(self, sample: Callable[..., Example]) -> None:
        """Stop, on all ranks, where the step is another on parts of a batch than on the whole.

        Steps that are the template's, of a loss that compares no samples, are tried in evaluation
        (`Evaluator.check_loss`), which takes less time.
        """
        settings = self._settings
        by_ranks = self._world.size > 1 or settings.virtual_ranks > 0
        if not objective.divides(settings, self._world.size) or self._draws_by_place:
            return
        own = self.own_losses or not self.of_template
        looks = own or across.used or self._adds_of_samples
        mixes = bool(getattr(self._task, "mixes", False))
        if not (looks or mixes or (by_ranks and self._combiner.changes())):
            return
        micro_batch = settings.global_batch_size // settings.accumulation_steps
        by_steps = settings.accumulation_steps > 1
        uneven = by_ranks and micro_batch % (settings.virtual_ranks or self._world.size) > 0
        uneven = uneven and not by_steps  # which takes an even number
        count = trial.samples_of(tf.nest.flatten(self._spec)[0].shape[1], uneven)
        whose = "run.loss(batch, losses): " if self.own_losses else "the task's loss: "
        near = objective.nearness(settings)
        plan = trial.Plan(count, by_ranks=by_ranks, by_steps=by_steps, near=near, whose=whose)
        with self._world.fail_together("trying the step"):
            places = [self._world.rank * count + i for i in range(count)]
            examples = [sample(place, draw=place if mixes else 0) for place in places]
            with trial.at_rest(self._state.task_state.layers):
                for function, changed in self._functions:
                    for step in self._steps_to_try(own):
                        run = partial(self._tried, function, changed, step)
                        for note in trial.compare(plan, examples, run, combiner=self._combiner):
                            say(self._world, f"note: {note}")

    def _steps_to_try(self, own: bool) -> list[int]:
        """The next step; where losses or the step are a user's `own`, also the run's last.

        What grows from 0 with the step has no effect at the first one.
        """
        first = int(self._state.step)
        last = self._settings.num_steps - 1
        return [first, last] if own and last > first else [first]

    def _tried(
        self,
        function: Callable[[Example], Result],
        changed: list[tf.Variable],
        step: int,
        batch: Example,
        part: trial.Part,
    ) -> trial.Outcome:
        """What the step makes of a small batch, as one of several ranks; it leaves no trace."""
        twin = copy.copy(self)
        samples = sum(part.samples)
        twin._is_tried = True
        twin._changed = changed
        twin._settings = dataclasses.replace(
            self._settings, global_batch_size=samples, accumulation_steps=part.steps, jit=False
        )
        twin._world = dataclasses.replace(self._world, rank=part.rank, size=len(part.samples))
        twin._spec = batch
        twin._rows = across.Batch(samples, part.rank, len(part.samples))
        twin._micro_batches = gradients_lib.MicroBatches(part.steps, self._variables)
        twin._combiner = self._combiner.of_part(
            twin._world, twin._settings, batch, uses=part.combines
        )
        votes = tf.zeros([agreement.NUM_VOTES], tf.float64)
        what = f"the step, tried on {samples} samples (take sizes from tensors, not from settings),"
        own = task_checks.user_code_errors(what)
        self._stand_in = twin
        try:
            variables = self._state.variables
            with unchanged(list(map(raw, variables.values()))), own:
                self._state.step.assign(step)
                leave_zero(self.weights)
                _, traced = twin._called(function, batch, votes)
                state = {name: raw(v).numpy() for name, v in variables.items()}
        finally:
            self._stand_in = None
        means = [None if g is None else g.numpy() for g in traced.means]
        return trial.Outcome(state, means, [sums.numpy() for sums in traced.sums], traced.terms)

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


def _as_means(targets: list[tf.Tensor], to_means: list[tf.Tensor]) -> list[tf.Tensor]:
    """Of each term, and of what the model adds, which is one already."""
    means = [target * tf.cast(to, target.dtype) for target, to in zip(targets, to_means)]
    return [*means, *targets[len(means) :]]


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
