"""One training step on all ranks: forward and backward, one reduction, unscale, judge, apply.

train.py writes the step with its own tape; `Step` has its parts.

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
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvdkit.ranks import agreement
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.stragglers import own_part
from hvdkit.ranks.world import World, raw
from hvdkit.settings import Settings
from hvdkit.train.optim import optimizer as optimizers
from hvdkit.train.optim import schedule
from hvdkit.train.step import (
    across,
    calls,
    combine,
    graph_checks,
    objective,
    reduction,
    updating,
)
from hvdkit.train.step import gradients as gradients_lib
from hvdkit.train.step import losses as losses_lib
from hvdkit.train.step.gradients import StepTotals
from hvdkit.train.step.programs import Programs
from hvdkit.train.step.state import State
from hvdkit.train.step.tracing import Result, StepFunction, Tracing
from hvdkit.train.task import checks as task_checks
from hvdkit.train.task.protocol import Example, Task
from hvdkit.train.virtual import passes as virtual

Losses = Callable[[Example], Any]  # returns what a task's `loss` does


class OwnPart(NamedTuple):
    """What this rank gives to a step before it waits for others."""

    targets: list[tf.Tensor]  # scalars to differentiate
    sums: tf.Tensor  # those of `Forward`
    mean: tf.Tensor  # the mean loss, [1]
    numbers: tf.Tensor  # sums and votes, as they travel


class SimulatedShare(NamedTuple):
    """What of a small batch a trial of the step computes, as one of several ranks."""

    rank: int
    samples: Sequence[int]  # how many each rank has
    steps: int = 1  # number of micro-batches
    combines: bool = True  # whether state is combined by its rules
    # Names of state with which each forward pass begins as the first one did.
    kept: Collection[str] = ()
    draw: int = 0  # to draw other random numbers than with 0
    scale: float = 1.0  # of what is differentiated: what a step does to large gradients


class Step:
    """The parts of a step, for the function that `trace` traces.

    Attributes:
      weights: the model's trainable variables, as tf.Variables, in their order.
      reduction: what hvd.DistributedGradientTape takes besides `op`.
      special: why only the engine's step will do; "" where any does.
      of_template: whether make_step of train.py is the template's; `Run.make_step` says it.
      own_losses: whether run.loss was given losses in place of the task's; once traced.
      adds_of_samples: whether the model adds losses of its samples; once traced.
      draws_by_place: see graph_checks.draws_by_place; once traced.
      why_branch: why the newest step's update is a branch where it should be a program of XLA.
      functions: what `trace` was given; what each changes outside of forward passes and updates;
        and what its forward passes assign (`Combiner.assigned`).
    """

    def __init__(
        self, settings: Settings, world: World, task: Task, *, state: State, spec: Any
    ) -> None:
        """`spec`: of a batch, nested tensors [micro-batches, samples, ...]."""
        self.settings = settings
        self.world = world
        self.task = task
        self.state = state
        self.spec = spec
        self._variables = state.model.trainable_variables
        self.weights = [raw(v) for v in self._variables]
        self.reduction = reduction.arguments(settings, self._variables)
        self.special = reduction.needs_own_step(settings, self._variables)
        self.of_template = False
        self.own_losses = False
        self.adds_of_samples = False
        self.draws_by_place = False
        self.why_branch = ""
        self.functions: list[
            tuple[StepFunction, list[tf.Variable], dict[int, tf.Tensor]]
        ] = []
        self.combiner = combine.Combiner(world, settings, state, task=task, spec=spec)
        with world.fail_together("making the schedule"):
            self._schedule = schedule.of_run(
                task, settings, world.size, plateau=state.plateau
            )
        steps = settings.accumulation_steps
        self._micro_batches = gradients_lib.MicroBatches(steps, self._variables)
        self._programs = Programs(jit=settings.jit)
        across.used = False
        refused = ""
        if steps > 1:
            refused = (
                f"--accumulation_steps={steps} computes a batch in parts, one after the other: "
                "leave it out"
            )
        self._rows = across.Batch(
            settings.global_batch_size, world.rank, world.size, refused
        )
        # What a forward pass in training may change: moving statistics, seeds, a layer's counters,
        # and weights, as Keras's SpectralNormalization does.
        self._of_forward = [*state.of_forward, *self.weights]
        # What a step's function may change by itself, outside of forward passes.
        self._guarded = [*self.weights, *state.untrained]
        # For each variable: whether it has a gradient. Empty until the step is traced.
        self._connected: list[bool] = []
        self._changed: list[tf.Variable] = []  # what the newest function itself changes
        self._terms: tuple[str, ...] = ()  # names of the newest loss's terms
        self._tracing: Tracing | None = None
        self._note_on_masks = ""
        self._is_tried = False  # whether it is a simulated rank's, in a trial
        # In a trial: state with which each forward pass begins, and its values.
        self._kept: list[tuple[tf.Variable, tf.Tensor]] = []
        self._scale = 1.0

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
        tracing = self._tracing_for("run.loss")
        if tracing.totals is not None:
            raise ValueError(
                "run.loss is called once a step: add two losses in run.loss(batch, f); for "
                "gradients of several by themselves there is run.losses"
            )
        tracing.has_loss = True
        targets, received = self._targets(batch, losses)
        if len(targets) == 1:
            tracing.factor = self._to_mean
            return targets[0]
        tracing.factor = self._to_unscaled
        return tf.add_n(self._as_means(targets, received))

    def losses(
        self, batch: Example, losses: Losses | None = None
    ) -> dict[str, tf.Tensor]:
        """This rank's part of each term of the loss, a mean over the global batch; scalars.

        By the term's name: "loss" where it has none, "keras_loss" for what the model adds. As often
        as the step needs, inside a tape, and not beside `loss`. Gradients of them, summed over
        ranks, are those of the means, times the loss scale, which `update` takes out: it takes
        what they are combined to. The step's figures are those of the first call. It is slower
        than `loss`, as the backward pass waits for the sums of all ranks.
        """
        tracing = self._tracing_for("run.losses")
        if tracing.has_loss:
            raise ValueError(
                "run.losses and run.loss do not go together: call run.losses only"
            )
        targets, received = self._targets(batch, losses)
        tracing.factor = self._to_unscaled
        names = [name or "loss" for name in self._terms]
        return dict(zip([*names, "keras_loss"], self._as_means(targets, received)))

    def _targets(
        self, batch: Example, losses: Losses | None
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Of each term what to differentiate; the step's numbers, summed over ranks."""
        tracing = self._tracing_for("run.loss")
        self._check_batch(batch)
        self.own_losses = self.own_losses or losses is not None
        with tracing.engine_operations():
            own = self._own_part(partial(self._forward, losses=losses), batch)
            tracing.sums.append(own.sums)

            # One rank exchanges and times nothing, so its GPU may run behind the host.
            is_alone = self.world.size == 1
            ready = tf.zeros([], tf.float64)
            if not is_alone and not self._is_tried:
                ready = own_part(own.sums)

            # One collective carries both, of one size on any number of ranks. Its name holds the
            # terms' names: ranks with different terms are found out.
            received = own.numbers
            if not is_alone:
                received = hvd.allreduce(
                    received,
                    op=hvd.Sum,
                    name=".".join(
                        ["step.totals", *[term for term in self._terms if term]]
                    ),
                    device_dense=reduction.device(self.settings),
                )
            if tracing.totals is None:
                tracing.totals = StepTotals(
                    received=received, losses=own.mean, ready=ready
                )
                tracing.terms = self._terms
        if self._scale == 1.0:
            return own.targets, received
        return [target * self._scale for target in own.targets], received

    def _own_part(self, forward: gradients_lib.Forward, batch: Example) -> OwnPart:
        """Forward and backward pass of this rank's share; with --jit one program of XLA."""
        tracing = self._tracing_for("run.loss")
        if not self.settings.jit:
            targets, sums = self._micro_batches.loss(forward, batch)
            return self._with_numbers(targets, sums, tracing.votes)

        # On a GPU, XLA reads no variable that is on the host.
        device = self.weights[0].device
        readable = [
            variable for variable in self._of_forward if variable.device == device
        ]

        def passes(batch: Example, votes: tf.Tensor):
            old_values = [graph_checks.read(variable) for variable in readable]
            targets, sums, gradients = self._micro_batches.gradients(forward, batch)
            changed = {}
            for place, variable in enumerate(readable):
                if self.combiner.assigns(variable):
                    changed[place] = old_values[place]
            return self._with_numbers(targets, sums, votes), gradients, changed

        own, gradients, changed = self._programs.run(passes, batch, tracing.votes)
        for place, old_value in changed.items():
            tracing.kept.setdefault(id(readable[place]), old_value)
        targets = self._micro_batches.attached(own.targets, gradients, self._programs)
        return own._replace(targets=targets)

    def _with_numbers(
        self, targets: list[tf.Tensor], sums: tf.Tensor, votes: tf.Tensor
    ) -> OwnPart:
        numbers = tf.stop_gradient(tf.concat([sums, votes], 0))
        if self.world.size > 1:
            numbers = reduction.split(numbers, self.settings, self._variables)
        mean = tf.reduce_sum(gradients_lib.means_of(sums), keepdims=True)
        return OwnPart(targets, sums, mean, numbers)

    def _as_means(
        self, targets: list[tf.Tensor], received: tf.Tensor
    ) -> list[tf.Tensor]:
        """Of each term, and of what the model adds, which is one already."""
        dtype = targets[0].dtype

        def to_means(received: tf.Tensor) -> list[tf.Tensor]:
            sums, _ = _sums_and_votes(received)
            factors = tf.stop_gradient(gradients_lib.to_means(sums))
            return tf.unstack(tf.cast(factors, dtype))

        factors = self._programs.run(to_means, received)
        means = [target * factor for target, factor in zip(targets, factors)]
        return [*means, *targets[len(means) :]]

    def _to_mean(self, sums: tf.Tensor) -> tf.Tensor:
        """What makes means of gradients of the only term's sum."""
        return gradients_lib.to_means(sums)[0] / self.state.loss_scale.read(tf.float64)

    def _to_unscaled(self, sums: tf.Tensor) -> tf.Tensor:
        """What makes means of gradients of means, which are times the loss scale."""
        return 1 / self.state.loss_scale.read(tf.float64)

    def _check_batch(self, batch: Example) -> None:
        sizes = list(tf.nest.flatten(batch)[0].shape[:2])
        step_sizes = list(tf.nest.flatten(self.spec)[0].shape[:2])
        if sizes != step_sizes:
            raise ValueError(
                f"run.loss takes as many samples as the step's batch, {step_sizes}, not {sizes}: "
                "for two views of a sample return the mean of their losses"
            )

    def update(self, gradients: list[tf.Tensor | tf.IndexedSlices | None]) -> Result:
        """Applies gradients of `loss`, summed over ranks; call it once a step, return its result.

        In order: unscale, judge whether all is finite, L2, clip by the global norm, set the rate of
        the schedule, apply; alike on every rank. A step that is not finite leaves no trace.
        """
        tracing = self._tracing_for("run.update")
        if tracing.totals is None:
            raise ValueError("run.update comes after run.loss(batch), in the same step")
        gradients = list(gradients)
        graph_checks.check_gradients(gradients, self._variables)
        with tracing.engine_operations():
            self.combiner.over_ranks(tracing.old_values)
            return self.apply(tracing.totals._replace(grads=gradients))

    def apply(self, totals: StepTotals) -> Result:
        """From gradients over the global batch to updated weights and the step's figures."""
        tracing = self._tracing_for("run.update")
        self._connected = [gradient is not None for gradient in totals.grads]
        if not any(self._connected):
            raise ValueError(reduction.NO_GRADIENTS)
        known = [gradient for gradient in totals.grads if gradient is not None]
        inputs = updating.UpdateInputs(
            received=totals.received,
            grads=[tf.convert_to_tensor(gradient) for gradient in known],
        )
        result = dict(self._update_or_undo(inputs))
        result.setdefault("layers", None)
        result["losses"] = totals.losses
        if self.world.size > 1:
            result["ready"] = totals.ready
        if totals.faults is not None:
            result["faults"] = totals.faults
        # A copy, as the step's function may change the dict.
        tracing.results.append(dict(result))
        return result

    def _update_or_undo(self, inputs: updating.UpdateInputs) -> Result:
        tracing = self._tracing_for("run.update")
        undo = []
        for variable in self._of_forward:
            if self.combiner.assigns(variable):
                place = id(variable)
                undo.append(
                    (variable, tracing.kept.get(place, tracing.old_values[place]))
                )
        self.why_branch = ""
        if self._is_tried or not (self.settings.jit or world_lib.gpu()):
            return updating.by_branch(self._judged, undo, inputs)
        # The rate of the step stands in a checkpoint, whether the step updates or not.
        rate = raw(self.state.optimizer.learning_rate)
        trained = [v for v in [*self.weights, *self.state.updated] if v is not rate]
        try:
            return updating.by_choice(self._judged, undo, inputs, trained=trained)
        except ValueError as error:
            self.why_branch = str(error)
            return updating.by_branch(self._judged, undo, inputs)

    def _judged(self, inputs: updating.UpdateInputs) -> updating.Verdict:
        """As updating.py describes it."""
        state = self.state
        sums, votes = _sums_and_votes(inputs.received)
        # Read before `advance` changes it.
        figures = {"loss_scale": state.loss_scale.read(tf.float64), "votes": votes}
        variables = [
            v for v, connected in zip(self._variables, self._connected) if connected
        ]
        means = self._means(inputs.grads, sums, variables, figures)
        gradients, norm = gradients_lib.finish(
            means,
            variables,
            l2=optimizers.l2_weight(self.settings, state.optimizer),
            clip_norm=self.settings.clip_norm,
        )
        rate = self._schedule(state.step)
        state.optimizer.learning_rate.assign(
            tf.cast(rate, state.optimizer.learning_rate.dtype)
        )
        terms = gradients_lib.of_terms(sums)
        loss_sum = tf.reduce_sum(terms[:, 0])
        weight_sum = tf.reduce_sum(terms[:, 1])
        are_finite = tf.math.is_finite(tf.stack([loss_sum, weight_sum, rate, norm]))
        is_finite = tf.reduce_all(are_finite) & (rate >= 0)
        is_readable = votes[agreement.DATA_FAILED] == 0
        figures |= {"lr": rate, "grad_norm": norm, "finite": is_finite}

        def update() -> None:
            if self._is_tried:
                gradients_lib.descend(gradients, variables)
            else:
                state.apply(gradients, variables)

        def count() -> Result:
            state.advance(is_finite, is_readable)
            figures["step"] = state.step.read_value()
            figures["skipped_in_a_row"] = state.loss_scale.skipped_in_a_row.read_value()
            return figures | self._figures_of_loss(sums)

        return updating.Verdict(is_finite & is_readable, update, count)

    def _means(
        self,
        gradients: Sequence[tf.Tensor],
        sums: tf.Tensor,
        variables: Sequence[keras.Variable],
        figures: dict[str, tf.Tensor],
    ) -> list[tf.Tensor]:
        """Gradients of `variables` as means over the global batch; also their layers' figures."""
        tracing = self._tracing_for("run.update")
        means = list(gradients)
        if tracing.factor is not None:
            means = gradients_lib.unscale(means, tracing.factor(sums), variables)
        of_connected = iter(means)
        every = [
            next(of_connected) if connected else None for connected in self._connected
        ]
        if self._is_tried:
            tracing.means = every
        if self.settings.log_gradients or self.settings.dry_run:
            figures["layers"] = gradients_lib.layer_figures(every)
        return means

    def _figures_of_loss(self, sums: tf.Tensor) -> dict[str, Any]:
        tracing = self._tracing_for("run.update")
        means = gradients_lib.means_of(sums)
        names = tracing.terms or self._terms
        refused = tf.unstack(gradients_lib.of_terms(sums)[:, 3:])
        figures: dict[str, Any] = {"loss": tf.reduce_sum(means)}
        figures["refused_weights"] = dict(zip(names, refused))
        if tracing.adds_losses:
            figures["keras_loss"] = sums[-1]
        if any(names):
            figures["terms"] = dict(zip(names, tf.unstack(means)))
        return figures

    # ---- the forward pass -------------------------------------------------------------------

    def _forward(
        self,
        micro: Example,
        losses: Losses | None = None,
        turn: across.Turn | None = None,
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Of a micro-batch: scalars to differentiate, and its sums (`Forward`)."""
        tracing = self._tracing_for("run.loss")
        model = self.state.model
        for variable, value in self._kept:
            variable.assign(value)
        samples = tf.nest.flatten(micro)[0].shape[0]  # of this rank, in a micro-batch
        graph = tf.compat.v1.get_default_graph()
        names_before = graph_checks.names(graph)
        with tf.GradientTape() as tape, across.training(self._rows._replace(turn=turn)):
            terms, added = self._terms_of(micro, losses, samples)
        self._terms = tuple(terms)
        self.adds_of_samples |= losses_lib.adds_of_samples(model)
        tracing.adds_losses = added is not None
        graph_checks.check_collectives(
            graph, "the model or the task's loss", names_before
        )
        self.combiner.look(graph, names_before)
        graph_checks.check_weights(
            tape, [weights for _, weights in terms.values()], self.weights
        )

        global_batch = self.settings.global_batch_size
        targets = []
        sums = []
        for each, weights in terms.values():
            # Weight 0 leaves a position out of the sum, even if its loss is NaN.
            loss_sum = tf.reduce_sum(tf.math.multiply_no_nan(each, weights))
            # From the shape: what a rank's own data leave out or pad must not change it.
            per_sample = math.prod(size or 1 for size in each.shape[1:])
            scale = self.state.loss_scale.read(each.dtype)
            targets.append(loss_sum * scale / (per_sample * global_batch))
            count, *refused = objective.count(weights)
            sums += [loss_sum, count, samples * per_sample, *refused]
        if added is None:
            sums.append(0.0)
        else:
            added = tf.cast(added, each.dtype) * (samples / global_batch)
            targets.append(added * scale)
            sums.append(added)
        return targets, tf.stack([tf.cast(x, tf.float64) for x in sums])

    def _terms_of(
        self, micro: Example, losses: Losses | None, samples: int
    ) -> tuple[objective.Terms, tf.Tensor | None]:
        """The terms of the task's loss, or of `losses`; and what the model adds to it."""
        model = self.state.model
        with losses_lib.wide_activity_losses(model):
            if losses:
                # It may call a part of the model: what others added, in another graph, is no loss.
                model._clear_losses()
                with losses_lib.called_once(model):
                    returned = losses(micro)
            else:
                build_model = getattr(self.task, "build_model", None)
                with task_checks.user_code_errors(
                    "the model, called in training,", build_model
                ):
                    outputs = model(micro["inputs"], training=True)
        # The losses are taken here, as the task's loss may call the model again.
        added = losses_lib.added_loss(model)
        if not losses:
            terms = objective.loss(
                self.task, outputs, micro["targets"], samples=samples
            )
            self._note_on_masks = objective.note_on_masks(terms, outputs)
            return terms, added
        terms = objective.terms(returned, samples)
        if not self._is_tried:
            objective.check_independent(losses, micro, expected=terms)
        return terms, added

    # ---- the step as one graph --------------------------------------------------------------

    def trace(self, function: StepFunction) -> tf.types.experimental.ConcreteFunction:
        """`function` as one graph of (batch, votes), traced once; Stop where ranks trace others."""
        signature = [self.spec, tf.TensorSpec([agreement.NUM_VOTES], tf.float64)]
        self._note_on_masks = ""

        @tf.function(
            input_signature=signature,
            autograph=False,
            experimental_attributes=calls.CALLED_AS_A_WHOLE,
        )
        def train_step(batch: Example, votes: tf.Tensor) -> Result:
            result, _ = self.call(function, batch, votes)
            if self.settings.steps_per_call > 1:
                calls.name_shapes(tf.compat.v1.get_default_graph())
            return result

        with (
            self.world.fail_together("making the step"),
            task_checks.user_code_errors("the step"),
        ):
            traced = train_step.get_concrete_function()
            self._check(traced.graph)
        if self.why_branch:
            world_lib.say(
                self.world, f"note: the update is not compiled: {self.why_branch}"
            )
        if self._note_on_masks:
            world_lib.say(self.world, f"note: {self._note_on_masks}")
        agreement.check_gradients(self.world, self._variables, self._connected)
        agreement.check_collectives(self.world, traced)
        micro_batch = (
            self.settings.global_batch_size // self.settings.accumulation_steps
        )
        # Constants may depend on the size of a share, and each size is traced once; on the rank,
        # where rows are gathered, or in a step of one's own.
        is_same_code = self.of_template and not across.used
        shares = self.settings.virtual_ranks or self.world.size
        are_even = micro_batch % shares == 0 and shares % self.world.size == 0
        if is_same_code and are_even:
            near = objective.nearness(self.settings)
            agreement.check_constants(self.world, traced, near=near)
        tried = self._simple_step if self.special else function
        self.functions.append((tried, self._changed, self.combiner.assigned))
        self.draws_by_place |= graph_checks.draws_by_place(traced.graph)
        return traced  # train_step would take half a millisecond to find it

    def _check(self, graph: tf.Graph) -> None:
        optimizers.check_trainable(self.state.optimizer, self.state.model)
        graph_checks.check_state(graph, self.state, "the step", trains=True)
        graph_checks.check_draws(
            graph,
            "the step",
            "use keras.random with a keras.random.SeedGenerator that the layer makes in __init__",
        )
        graph_checks.check_sums(graph, self.world.size)
        if self.world.size > 1:
            graph_checks.check_compiled_sums(graph)
        graph_checks.check_compiles(self._programs.compiled)

    def call(
        self, function: StepFunction, batch: Example, votes: tf.Tensor
    ) -> tuple[Result, Tracing]:
        """What the step's function returns, and what became known of it on the way."""
        ids = [id(variable) for variable in self._guarded]
        old_values = dict(zip(ids, graph_checks.read_all(self._guarded)))
        self._tracing = tracing = Tracing(votes, old_values)
        if not self._is_tried:
            self.combiner.begin({})
        try:
            outside = self._rows._replace(
                refused="it belongs into the losses of run.loss"
            )
            with reduction.refuse_empty_group(), across.training(outside):
                result = function(batch)
            tracing.check_result(result)
            if not self._is_tried:
                self._changed = tracing.changed_by_function(self._guarded)
            self.combiner.over_ranks(old_values, self._changed)
            tracing.leave_no_trace(self._changed)
        finally:
            self._tracing = None
        return result, tracing

    def _tracing_for(self, caller: str) -> Tracing:
        if self._tracing is None:
            raise ValueError(
                f"{caller} belongs in the function that run.function wraps"
            )
        return self._tracing

    # ---- the engine's own step --------------------------------------------------------------

    def own_step(self) -> StepFunction | None:
        """The engine's step, where the settings need it; else None."""
        if self.settings.virtual_ranks:
            return self._virtual_step()
        return self._simple_step if self.special else None

    def _virtual_step(self) -> StepFunction:
        passes = virtual.Passes(
            self.settings,
            self.world,
            state=self.state,
            forward=self._forward,
            micro_batches=self._micro_batches,
            programs=self._programs,
            rules=self.combiner.rules,
        )

        def step(batch: Example) -> Result:
            tracing = self._tracing_for("run.loss")
            with tracing.engine_operations():
                return self.apply(passes.reduce(batch, tracing.votes))

        return step

    def _simple_step(self, batch: Example) -> Result:
        """The template's step, with gradients in messages that Horovod's tape cannot send."""
        with tf.GradientTape() as tape:
            loss = self.loss(batch)
        gradients = tape.gradient(loss, self.weights)
        return self.update(
            reduction.rank_sums(gradients, self.settings, self._variables)
        )

    # ---- for trials -------------------------------------------------------------------------

    @contextlib.contextmanager
    def simulated(
        self, share: SimulatedShare, batch: Example, *, changed: list[tf.Variable]
    ) -> Iterator[None]:
        """Inside, this is the step of a simulated rank, of a small batch; afterwards as it was.

        `batch` is the rank's; `changed`: what the step's function changes by itself. Each forward
        pass draws the same random numbers.
        """
        attributes = dict(vars(self))
        samples = sum(share.samples)
        size = len(share.samples)
        try:
            self._is_tried = True
            self._changed = changed
            self.settings = dataclasses.replace(
                self.settings,
                global_batch_size=samples,
                accumulation_steps=share.steps,
                jit=False,
            )
            self.world = dataclasses.replace(self.world, rank=share.rank, size=size)
            self.spec = batch
            self._rows = across.Batch(samples, share.rank, size)
            self._micro_batches = gradients_lib.MicroBatches(
                share.steps, self._variables
            )
            self._programs = Programs(jit=False)
            self.combiner = self.combiner.of_part(
                self.world, self.settings, batch, uses=share.combines
            )
            self._kept = self.combiner.kept(share.kept, share.draw)
            self._scale = share.scale
            yield
        finally:
            vars(self).update(attributes)


def _sums_and_votes(received: tf.Tensor) -> list[tf.Tensor]:
    numbers = reduction.join(received)
    return tf.split(
        numbers, [numbers.shape[0] - agreement.NUM_VOTES, agreement.NUM_VOTES]
    )
