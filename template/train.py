"""Trains a task on one GPU or a thousand, one process a GPU, with Horovod.

    python train.py --flagfile=configs/demo.cfg                          one rank
    horovodrun -np 2 python train.py --flagfile=configs/demo.cfg         two ranks on this host
    horovodrun -np 8 -H node1:4,node2:4 python train.py --flagfile=...   four GPUs on each of two

Typing the same command again goes on from the newest checkpoint in --run_dir.
`python train.py --help` lists the flags. Start reading at `train`.
"""

from __future__ import annotations

import engine.quiet  # noqa: F401

# isort: split
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

import config as config_lib
from config import Config
from data.pipeline import EvaluationFeed, TrainingFeed
from engine import (
    agreement,
    batch_norm,
    early_stop,
    ema,
    gradients,
    health,
    reduction,
    schedule,
    warm_start,
)
from engine import optimizer as optimizers
from engine import world as world_lib
from engine.checkpoint import Best, Checkpoints
from engine.sampler import Sampler
from engine.state import State
from engine.telemetry import Telemetry, describe_run
from engine.world import BUG, DIVERGED, DONE, PREEMPTED, WRONG_USE, Stop, World, complain, raw, say
from evaluation import Evaluator
from tasks import base as tasks


def train(config: Config, world: World, stop_signal: health.StopSignal) -> None:
    """The run, in order. Raises Stop when it ends before its last step."""
    # 1. One GPU a process, or a share of the cores.
    world_lib.set_up(world, config)
    say(world, world_lib.describe(world))

    # 2. The run's folder, with the settings that make this run again.
    run_dir = Path(config.run_dir)
    with world.together("opening the run folder"):
        if world.is_chief:
            (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
            config_lib.write(config, run_dir / "config.cfg")

    # 3. Data, model, and optimizer with all its variables, on every rank.
    with world.together("preparing the data"):
        task = tasks.load(config)
        if world.local_rank == 0:
            task.prepare()
    with world.together("opening the data"):
        train_source, val_source = task.sources()
        sampler = Sampler(
            len(train_source),
            config.global_batch_size,
            config.accumulation_steps,
            config.seed,
            world.rank,
            world.size,
        )
    world.check_same(train_source.fingerprint() + val_source.fingerprint(), "the data files")
    with world.together("building the model"):
        model = task.build_model()
        if config.bn_sync == "full":
            model = batch_norm.synchronize(model)
        optimizer = optimizers.build(config, model)
    state = State(model, optimizer, config.precision)
    say(world, describe_run(config, world.size, model, len(train_source), len(val_source)))

    # 4. The newest sound checkpoint, or another run's weights, chosen and read by rank 0.
    checkpoints = Checkpoints(run_dir / "checkpoints", config.keep, world)
    found = checkpoints.find(config.resume)
    if found:
        checkpoints.restore(found, state.variables, config)
    elif config.init_from:
        with world.together("reading the first weights"):
            if world.is_chief:
                warm_start.start(model, config)

    # 5. Everything from rank 0, before the first step.
    world.broadcast_variables(list(state.variables.values()))
    first_step = int(state.step)
    if found:
        say(world, f"going on from {found} at step {first_step}")

    # 6. Steps.
    feed = TrainingFeed(train_source, sampler, task.training_example, first_step, config.num_steps)
    eval_feed = EvaluationFeed(
        val_source, task.evaluation_example, config.eval_batch_size, world.rank, world.size
    )
    sync = batch_norm.make_sync(model, config.bn_sync, sampler.weight)
    evaluator = Evaluator(world, task, model, eval_feed)
    loop = Loop(config, world, task.main_metric, state, checkpoints, evaluator, sync)
    loop.run(feed, make_train_step(config, world, task, state, feed.spec), stop_signal)


def make_train_step(config: Config, world: World, task: tasks.Task, state: State, spec: Any):
    """Returns the function of (batch, votes) that does one step on all ranks together."""
    model, optimizer = state.model, state.optimizer
    variables = model.trainable_variables
    values = [raw(v) for v in variables]
    learning_rate = schedule.make(config, world.size)
    connected: list[bool] = []  # which variables the loss depends on; known once it is traced

    def forward(micro: tasks.Example) -> tuple[tf.Tensor, tf.Tensor]:
        outputs = model(micro["inputs"], training=True)
        losses, weights = task.loss(outputs, micro["targets"])
        loss_sum, count = tf.reduce_sum(losses * weights), tf.reduce_sum(weights)
        # Divided by the positions of the global batch, a number that all ranks know, so that
        # low precision does not overflow; the exact division by valid positions comes below.
        positions = tf.size(losses, tf.int64)
        a_sample = positions // tf.shape(losses, tf.int64)[0]
        scale = tf.cast(state.loss_scale.value, losses.dtype)
        target = loss_sum * scale / tf.cast(a_sample * config.global_batch_size, losses.dtype)
        return target, tf.stack([tf.cast(x, tf.float64) for x in (loss_sum, count, positions)])

    signature = [spec, tf.TensorSpec([health.NUM_VOTES], tf.float64)]

    @tf.function(input_signature=signature, autograph=False)
    def train_step(batch: tasks.Example, votes: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.GradientTape() as tape:
            target, sums = gradients.accumulate(
                forward, batch, config.accumulation_steps, variables
            )
        tape = reduction.distribute(tape, config, variables)  # hvd.DistributedGradientTape
        grads = tape.gradient(target, values, use_generic_names=True)
        connected[:] = [g is not None for g in grads]

        own_loss = tf.math.divide_no_nan(sums[0], sums[1])
        own_loss = tf.one_hot(world.rank, world.size, own_loss, tf.zeros([], tf.float64))
        totals = tf.concat([sums, votes, own_loss], 0)
        totals = hvd.allreduce(totals, op=hvd.Sum, name="step.totals")
        sums, votes, losses = tf.split(totals, [3, health.NUM_VOTES, world.size])
        loss_sum, count, positions = tf.unstack(sums)

        scale = tf.cast(state.loss_scale.value, tf.float64)
        grads = gradients.unscale(grads, tf.math.divide_no_nan(positions, count * scale))
        layers = gradients.layer_figures(grads) if config.log_gradients else None
        l2 = optimizers.l2_weight(config)
        grads, norm = gradients.finish(grads, variables, l2, config.clip_norm)
        finite = tf.math.is_finite(norm)
        readable = votes[health.DATA_FAILED] == 0

        rate = learning_rate(state.step)
        optimizer.learning_rate.assign(tf.cast(rate, optimizer.learning_rate.dtype))
        pairs = [(g, v) for g, v in zip(grads, variables) if g is not None]
        tf.cond(finite & readable, lambda: optimizer.apply(*zip(*pairs)), lambda: None)
        state.advance(finite, readable)
        return {
            "step": state.step.read_value(),
            "loss": tf.math.divide_no_nan(loss_sum, count),
            "lr": rate,
            "grad_norm": norm,
            "finite": finite,
            "votes": votes,
            "losses": losses,
            "layers": layers,
        }

    traced = train_step.get_concrete_function()
    agreement.check_gradients(world, variables, connected)
    agreement.check_collectives(world, traced)
    return train_step


class Loop:
    """Steps, and every so often: log, evaluate, save, look at the votes."""

    def __init__(
        self,
        config: Config,
        world: World,
        main_metric: str,
        state: State,
        checkpoints: Checkpoints,
        evaluator: Evaluator,
        sync_moving_statistics: Callable[[], None],
    ) -> None:
        self.config, self.world, self.state = config, world, state
        self.main_metric, self.evaluator, self.checkpoints = main_metric, evaluator, checkpoints
        self.step = int(state.step)
        self.telemetry = Telemetry(Path(config.run_dir), world, self.step, config.num_steps)
        self.sync_moving_statistics = sync_moving_statistics
        self.best = checkpoints.best()
        self.figures: dict[str, float] = {}
        self.evaluated_at: int | None = None

    def run(self, feed: TrainingFeed, train_step: Any, stop_signal: health.StopSignal) -> None:
        config = self.config
        # Synced every step, a sync at a step that nobody planned (a stop signal) changes no bit.
        sync_every = 1 if config.deterministic else config.bn_sync_every
        last = None
        while not self.over():
            batch = feed.next()
            votes = health.votes(feed.error is not None, stop_signal.asked)
            result = train_step(batch, votes)
            self.step += 1
            # Judged one step late, so that a GPU already has the next step to work on.
            self.judge(last, feed)
            last = result
            if sync_every and self.step % sync_every == 0:
                self.sync_moving_statistics()
            if self.step % config.log_every == 0:
                self.log(result)
            if config.benchmark:
                continue
            if self.due(config.eval_every) or self.due(config.checkpoint_every):
                self.judge(last, feed)
                self.look_and_save(evaluate=self.due(config.eval_every))
        self.judge(last, feed)
        if config.benchmark:
            return self.end("benchmark")
        if self.evaluated_at != self.step:
            self.look_and_save(evaluate=True)
        if self.step < config.num_steps:
            say(
                self.world,
                f"stopped early: no {self.main_metric} above {self.best.score:.4f}, of step "
                f"{self.best.step}, in {config.early_stop_evals} evaluations",
            )
        self.end("done" if self.step >= config.num_steps else "early stop")
        drawn = Path(config.run_dir) / "predictions.png"
        if drawn.exists():
            say(self.world, f"predictions, drawn: {drawn}")
        if config.autotune and self.world.is_chief:
            print(f"best setting found: {reduction.write_autotuned(config)}")

    def over(self) -> bool:
        """After the last step, or where no better score is to be expected."""
        config, best_step = self.config, self.best.step if self.best else None
        if early_stop.given_up(self.step, best_step, config.eval_every, config.early_stop_evals):
            return True
        return self.step >= config.num_steps

    def due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0 and self.step < self.config.num_steps

    def judge(self, result: dict[str, tf.Tensor] | None, feed: TrainingFeed) -> None:
        """Raises Stop, on every rank alike, if a step's totals say that the run cannot go on."""
        if result is None:
            return
        votes = result["votes"].numpy()
        if votes[health.DATA_FAILED]:
            errors = self.world.gather_objects(feed.error, "data.errors")
            self.step = int(self.state.step)
            self.save(None)
            self.end("bad data")
            raise Stop(WRONG_USE, next(e for e in errors if e))
        if not result["finite"] and self.config.precision != "float16":
            self.end("diverged")
            raise Stop(
                DIVERGED,
                f"diverged at step {int(result['step'])}: loss {float(result['loss']):g}, gradient "
                f"norm {float(result['grad_norm']):g} at learning rate {float(result['lr']):g}. "
                "Checkpoints are as they were. Try a lower --base_lr, --warmup_steps, --clip_norm",
            )
        if votes[health.STOP_ASKED]:
            self.save(None)
            self.end("preempted")
            raise Stop(PREEMPTED, f"told to stop: saved at step {self.step}; start again to go on")

    def log(self, result: dict[str, tf.Tensor]) -> None:
        figures = {name: float(result[name]) for name in ("loss", "lr", "grad_norm")}
        if self.config.precision == "float16":
            figures["loss_scale"] = float(self.state.loss_scale.value)
            figures["skipped"] = int(self.state.skipped)
        losses = result["losses"].numpy()
        self.telemetry.step(self.step, self.config.global_batch_size, figures, losses)
        if self.config.log_gradients:
            paths = [v.path for v in self.state.model.trainable_variables]
            self.telemetry.gradients(self.step, paths, result["layers"].numpy())

    def look_and_save(self, evaluate: bool) -> None:
        score = self.evaluate() if evaluate else None
        better = score is not None and (self.best is None or score > self.best.score)
        if better:
            self.best = Best(score, self.step)
        if better or self.over() or self.due(self.config.checkpoint_every):
            self.save(score)
        self.telemetry.resume_clock(self.step)

    def evaluate(self) -> float:
        """The score of the weights, or of their average where one is kept."""
        self.sync_moving_statistics()
        with ema.averaged(self.state.model, self.state.optimizer):
            self.figures, pictures = self.evaluator.run()
        self.evaluated_at = self.step
        self.telemetry.evaluation(self.step, self.figures, self.main_metric)
        if pictures is not None:
            self.telemetry.pictures(self.step, pictures)
        return self.figures[self.main_metric]

    def save(self, score: float | None) -> None:
        self.sync_moving_statistics()
        self.checkpoints.save(self.step, self.state.variables, self.config, score)

    def end(self, reason: str) -> None:
        """The run's last words, and the proof that all ranks hold the same weights."""
        self.sync_moving_statistics()
        model = self.state.model
        sha = world_lib.weights_sha256(model.variables)
        shared = model.trainable_variables if self.config.bn_sync == "none" else model.variables
        self.world.check_same(world_lib.weights_sha256(shared), "the final weights")
        self.telemetry.summary(
            {"step": self.step, "exit_reason": reason, "skipped_steps": int(self.state.skipped)}
            | {"samples_per_second": self.telemetry.median_speed()}
            | {f"eval_{name}": value for name, value in self.figures.items()}
            | {"weights_sha256": sha, "ranks": self.world.size}
        )


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 2 wrong use, 3 diverged, 75 preempted and saved."""
    try:
        config = config_lib.parse(argv)
    except ValueError as error:
        if world_lib.launch_rank() == 0:
            complain(str(error))
        return WRONG_USE
    stop_signal = health.StopSignal()  # from here on: a run may be told to stop while it starts
    world, code = world_lib.connect(reduction.environment(config)), DONE
    try:
        train(config, world, stop_signal)
    except Stop as stop:
        code = stop.code
        if world.is_chief:
            complain(str(stop))
    except tf.errors.OpError as error:
        if "Horovod has been shut down" not in str(error):
            raise
        complain(f"rank {world.rank} on {world_lib.hostname()} ends: another rank ended before it")
        return BUG
    world_lib.finish(world)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
