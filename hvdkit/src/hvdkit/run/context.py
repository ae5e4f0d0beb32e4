"""What a run is made of, for every command and every test, and where it begins."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, NamedTuple

import keras

from hvdkit import scores
from hvdkit.checkpoint import files, lease, run_folder, warm_start
from hvdkit.checkpoint.checkpoints import CheckpointInfo, Checkpoints, measure
from hvdkit.checkpoint.writing import check_types
from hvdkit.data import card as cards
from hvdkit.data import classes, shared_listing
from hvdkit.data.open import trained_on_too
from hvdkit.data.pipeline import Reader
from hvdkit.data.place import BEGINNING, Place
from hvdkit.data.sampler import shards_of
from hvdkit.data.source import Source
from hvdkit.logs import join
from hvdkit.ranks import agreement
from hvdkit.ranks import world as world_lib
from hvdkit.ranks.world import World, raw, say
from hvdkit.settings import Settings, runs
from hvdkit.stop import GoBack, NotNow
from hvdkit.train.layers import batch_norm, compute_types, dropout, masks, preprocessing
from hvdkit.train.optim import optimizer as optimizers
from hvdkit.train.optim import schedule
from hvdkit.train.step.state import State, TaskState, names_of_model
from hvdkit.train.task import checks as task_checks
from hvdkit.train.task import protocol as tasks


@dataclasses.dataclass(frozen=True)
class RunContext:
    """What every part of a run needs; made by `prepare`, the same on all ranks."""

    config: Settings
    world: World
    task: tasks.Task
    train_source: Source
    val_source: Source
    train_reader: Reader
    model: keras.Model
    optimizer: keras.optimizers.Optimizer
    state: State
    checkpoints: Checkpoints
    fingerprint: dict[str, str]  # hvdkit/ranks/fingerprint.py says what it holds.


def find_start(
    config: Settings, world: World, back: GoBack | None = None
) -> tuple[CheckpointInfo | None, set[str]]:
    """The checkpoint that a run begins with, the same on all ranks, or None; locks the folder.

    Also the names of the checkpoints that there were, on rank 0. `back`: the run goes back to an
    earlier checkpoint of its own. Raises Stop: on all ranks, when the folder is in use, or what
    --resume names cannot be read.
    """
    world.from_chief("locking the run folder", lease.take, Path(config.run_dir))
    checkpoints = Checkpoints(Path(config.run_dir) / "checkpoints", config.keep, world)
    checkpoint = checkpoints.find(back.path if back else config.resume)
    if checkpoint and back:
        skipped_steps = back.last - checkpoint.step
        place = checkpoint.place.left_out(skipped_steps, config.global_batch_size)
        checkpoint = checkpoint._replace(place=place)
    return checkpoint, checkpoints.listed


def make_task(config: Settings, world: World) -> tasks.Task:
    """The task, with its data prepared; every rank must call it. Raises Stop, on all ranks."""
    world_lib.set_numbers(config)
    with (
        world.fail_together("preparing the data", by_host=True),
        task_checks.user_code_errors("preparing the data"),
    ):
        if run_folder.data_away(config):
            raise NotNow(
                f"the data of the run in {config.run_dir} are away: {config.data_dir}"
            )
        task = tasks.load_task(config)
        prepare_data = tasks.optional(task, "prepare")
        if prepare_data and world.local_rank == 0:
            prepare_data()
    return task


def prepare(
    task: tasks.Task,
    config: Settings,
    world: World,
    *,
    checkpoint: Path | None = None,
    place: Place | None = None,
) -> RunContext:
    """Data, model, and optimizer with all its variables; every rank must call it.

    Weights are those of a new run with this seed, and may differ between ranks until `begin`.

    `task`: what `make_task` made. `checkpoint`: the data must have its classes. `place`: where a
    run that trains begins in its data. Raises Stop: on all ranks, when a part cannot be made, or
    their data or devices differ.
    """
    fingerprint = agreement.fingerprint(world, config)
    names = _classes(world, checkpoint)
    with classes.known.set(names):
        train_source, val_source = open_sources(world, task)
    if names and not classes.of(train_source):
        say(
            world,
            "note: the data name no classes: their numbers are taken for the model's, whose class "
            f"0 is {names[0]!r}",
        )
    with world.fail_together("counting epochs"):
        # Data without shards are refused before the model is built.
        if place is not None:
            shards_of(train_source, config.shuffle_shards)
        config = tasks.counted(
            task, config, len(train_source), place=place or BEGINNING
        )
        _check_not_past(config, place or BEGINNING, checkpoint)
    with world.fail_together("building the model"):
        model, train_reader = _build_model(
            world, task, config, train_source=train_source
        )
        with task_checks.user_code_errors("optimizer"):
            rule = optimizers.build(
                config,
                model,
                tasks.optional(task, "optimizer"),
                trains=place is not None,
            )
        rules = {"optimizer": _described(rule, model)}
        if place is not None:
            rules["schedule"] = schedule.points(task, config)
    agreement.check_optimizer(world, rules["optimizer"])
    state = State(model, rule, config.precision, task=task)
    with world.fail_together("what the task holds"):
        _settle_task(state.task_state, config)
    with world.fail_together("opening the data"):
        check_types(state.variables)
        score_measure = measure(config, scores.of_task(task), val_source.fingerprint())
        card = _data_card(task, config, train_source, val_source)
    checkpoints = Checkpoints(
        Path(config.run_dir) / "checkpoints",
        config.keep,
        world,
        fingerprint=fingerprint,
        measure=score_measure,
        card=card,
        rules=rules,
        train_source=train_source,
    )
    return RunContext(
        config=config,
        world=world,
        task=task,
        train_source=train_source,
        val_source=val_source,
        train_reader=train_reader,
        model=model,
        optimizer=rule.optimizer,
        state=state,
        checkpoints=checkpoints,
        fingerprint=fingerprint,
    )


def _build_model(
    world: World, task: tasks.Task, config: Settings, *, train_source: Source
) -> tuple[keras.Model, Reader]:
    """The task's model, built and tried with a training sample, and the reader of such samples."""
    with task_checks.user_code_errors("build_model"):
        model = task.build_model()
    train_reader = task_checks.reader(task, train_source, training=True)
    bad = config.most_bad_samples(len(train_source))
    example = task_checks.read_example(train_reader, training=True, bad=bad)
    task_checks.build_variables(model, example)
    for note in _check_model(model, example["inputs"], config.precision):
        say(world, f"note: {note}")
    return _for_ranks(model, config), train_reader


def _data_card(
    task: tasks.Task, config: Settings, train_source: Source, val_source: Source
) -> dict[str, Any]:
    with task_checks.user_code_errors("augmentation"):
        describe_augmentation = tasks.optional(task, "augmentation")
        augmentation = describe_augmentation() if describe_augmentation else {}
        return cards.made(config, train_source, val_source, augmentation=augmentation)


def judge_plateau(context: RunContext, *, value: float, step: int) -> None:
    """After an evaluation: with --lr_policy=plateau it may lower the learning rate."""
    if schedule.by_plateau(context.task, context.config):
        value = context.world.broadcast_object(value, f"plateau.{step}")
        metric = scores.of_task(context.task)
        note = context.state.plateau.judge(
            context.config,
            metric,
            value=value,
            step=step,
            scaling=context.config.lr_factor(context.world.size),
        )
        if note:
            say(context.world, note)


def begin_optimizer(context: RunContext) -> None:
    """Gives an optimizer that began with copies of the weights those that were read."""
    if not optimizers.begins_with_weights(context.optimizer):
        return
    make = tasks.optional(context.task, "optimizer")
    new_optimizer = optimizers.build(context.config, context.model, make).optimizer
    pairs = zip(context.optimizer.variables, new_optimizer.variables, strict=True)
    for variable, new_variable in pairs:
        raw(variable).assign(raw(new_variable))


def _for_ranks(model: keras.Model, config: Settings) -> keras.Model:
    """The model with layers that normalize as the settings say."""
    if config.bn_sync == "full":
        model = batch_norm.synchronize(model)
    elif world_lib.gpu() and not config.jit:  # XLA fuses Keras's operations itself.
        batch_norm.fuse(model)
    return model


def _settle_task(task_state: TaskState, config: Settings) -> None:
    """What the task holds besides the model normalizes and draws as the model does."""
    if config.bn_sync == "full":
        batch_norm.synchronize_layers(task_state.layers)
    # With virtual ranks, the step seeds generators by virtual rank.
    if not config.virtual_ranks:
        dropout.draw_by_rank(task_state.generators)


def _described(rule: optimizers.UpdateRule, model: keras.Model) -> dict[str, str]:
    """What a task's optimizer was made with, by name."""
    if not rule.described:
        return {"optimizer": "that of --optimizer"}
    ids = [id(variable) for variable in model.variables]
    names = dict(zip(ids, names_of_model(model)))
    return rule.described | optimizers.of_weights(rule, names)


def _check_model(model: keras.Model, inputs: Any, precision: str) -> list[str]:
    """Notes on a built model; ValueError where it does not compute in the run's type."""
    texts = compute_types.check_types(model, precision)
    texts += masks.notes_on_lost_masks(model, inputs)
    texts += dropout.notes_on_equal_draws(model._flatten_layers())
    if preprocessing.leaves_unscaled(model, inputs):
        texts.append(
            f"{model.name} takes pictures of 0 to 255 and no layer of it scales them: begin it "
            "with hvdkit.train.preprocessing.scaled, which makes [-1, 1] of them"
        )
    return texts


def _check_not_past(config: Settings, place: Place, checkpoint: Path | None) -> None:
    if place.step > config.num_steps:
        raise ValueError(
            f"{checkpoint} is of step {place.step}, past --num_steps={config.num_steps}: give more "
            "--num_steps, another --run_dir or --resume=never"
        )


def _classes(world: World, checkpoint: Path | None) -> list[str]:
    """Names of the classes of a checkpoint, if there is one and has any."""
    if not checkpoint:
        return []
    card = world.from_chief("reading the data card", files.card_of, checkpoint)
    return card.get("class_names", [])


def open_sources(world: World, task: tasks.Task) -> tuple[Source, Source]:
    """The task's sources, the same on all ranks; every rank must call it.

    Rank 0 lists files and broadcasts the lists: a thousand ranks that list a network disk would
    keep each other waiting. Of another host's disk, one rank looks at some files.

    Raises Stop: on all ranks, when the data cannot be opened, or differ.
    """
    sources = None
    listings: dict[str, Any] = {}
    listing = (
        shared_listing.kept(listings) if world.is_chief else shared_listing.awaited()
    )
    with (
        world.fail_together("opening the data"),
        task_checks.user_code_errors("sources"),
        listing,
    ):
        train, val = sources = task.sources()
    listings = world.broadcast_object(listings, "listings")
    with (
        world.fail_together("opening the data", by_host=True),
        task_checks.user_code_errors("sources"),
    ):
        if sources is None:  # The sources need a list of rank 0.
            is_first_of_host = world.local_rank == 0
            with shared_listing.received(listings, checks_disk=is_first_of_host):
                train, val = task.sources()
        train = classes.numbered(train, "the training split")
        val = classes.numbered(val, "the validation split", classes.of(train))
        both = (train.fingerprint(), val.fingerprint())
        if not all(isinstance(fingerprint, str) for fingerprint in both):
            raise ValueError(
                f"a source's fingerprint() must return text, not {both!r:.200}"
            )
        fingerprints = "".join(both)
    world.check_same(fingerprints, "the data")
    return train, val


def describe(run: RunContext, place: Place) -> str:
    """What is trained, on how many samples and at which rate; `place`: where the run begins."""
    config = run.config
    end = place.after(config.num_steps - place.step, config.global_batch_size)
    epochs = end.samples / len(run.train_source)
    rule = config.optimizer
    if tasks.optional(run.task, "optimizer"):
        rule = f"the task's {type(run.optimizer).__name__}"
    return (
        f"{config.task}/{run.model.name}: {run.model.count_params():,} parameters, "
        f"{len(run.train_source):,} + {len(run.val_source):,} samples; {config.num_steps} steps of "
        f"{config.global_batch_size} ({epochs:.3g} epochs), {rule}, "
        f"{schedule.describe_policy(run.task, config, run.world.size)}"
    )


def notes(run: RunContext) -> list[str]:
    """Surprising settings, a sentence each."""
    return (
        run.config.notes()
        + _notes_on_scaling(run)
        + _notes_on_data(run)
        + _notes_on_model(run)
    )


def _notes_on_scaling(run: RunContext) -> list[str]:
    """A note where the learning rate grows with the ranks, and the batch does not.

    A run that goes on by its own config.cfg finds the batch of its ranks there.
    """
    config = run.config
    is_fixed = config.lr_scaling != "none" and not config.grows_with_ranks
    goes_on = (
        "lr_scaling" in config.came_with_file
        and Path(config.run_dir, runs.CONFIG).exists()
    )
    if run.world.size == 1 or not is_fixed or goes_on:
        return []
    return [
        f"--lr_scaling={config.lr_scaling} multiplies the learning rate by the ranks, and any "
        f"number of them shares --global_batch_size={config.global_batch_size}: give "
        "--batch_per_rank, or --lr_scaling=none"
    ]


def _notes_on_data(run: RunContext) -> list[str]:
    config = run.config
    texts = []
    in_both = 0
    # Equal splits have a note of their own.
    if run.world.is_chief and config.train_split != config.val_split:
        in_both = trained_on_too(run.train_source, run.val_source)
    if in_both:
        texts.append(
            f"{in_both:,} of the {len(run.val_source):,} validation pictures are trained on too "
            f"(--train_split={config.train_split}, --val_split={config.val_split})"
        )
    if config.shuffle_shards and not getattr(run.train_source, "is_shuffled", False):
        texts.append(
            f"--shuffle_shards={config.shuffle_shards}: samples lie in the order of their files; "
            "where that is the order of classes, pack with --shuffle=1, or batches lack classes"
        )
    names = classes.of(run.train_source)
    if bool(names) != bool(classes.of(run.val_source)):
        nameless = "val" if names else "train"
        texts.append(
            f"the {nameless} split names no classes: its numbers are taken for those of the other"
        )
    if all(name.isdecimal() for name in names) and names != sorted(names, key=int):
        place = next(n for n, name in enumerate(names) if int(name) != n)
        texts.append(
            f"classes are numbered in the order of their names as text: {place} is {names[place]!r}"
        )
    for split, source in (("train", run.train_source), ("val", run.val_source)):
        if lacking := cards.lacking(split, source):
            texts.append(lacking)
    return texts


def _notes_on_model(run: RunContext) -> list[str]:
    config = run.config
    model = run.model
    texts = []
    if model.compiled:
        texts.append(
            "the optimizer and the loss that the model was compiled with are not used"
        )
    not_decayed = optimizers.not_decayed(model.trainable_variables)
    if config.weight_decay and not_decayed:
        texts.append(
            f"--weight_decay leaves {join(not_decayed)} alone: it decays kernels"
        )
    if config.accumulation_steps > 1:
        for layer in model._flatten_layers():
            if type(layer).__name__ == "SpectralNormalization":
                texts.append(
                    f"{layer.name} normalizes its weights once a micro-batch: with "
                    f"--accumulation_steps={config.accumulation_steps} it is another run than "
                    "without"
                )
                break
    if quantized := compute_types.quantized(model):
        texts.append(
            f"{join(quantized)} are quantized, and their kernels are not trained: call "
            "enable_lora on them, or quantize the model once it is trained"
        )
    if run.world.size == 1 or config.virtual_ranks:
        return texts
    if batch_norm.normalizing(model):
        texts.append(
            "batch norms normalize with each rank's own batch, so weights depend on the number of "
            "ranks; with --bn_sync=full they do not"
        )
    if random_layers := dropout.drawing_layers(model):
        texts.append(
            f"random numbers of {join(random_layers)} are drawn by rank: weights depend on the "
            "number of ranks (with hvdkit.train.dropout.SampleDropout they do not)"
        )
    return texts


def bring_to_all(world: World, state: State) -> None:
    """Gives every rank rank 0's variables, and layers what they make of them; all must call it."""
    world.broadcast_variables(list(state.variables.values()))
    with world.fail_together("comparing lookup tables"):
        state.task_state.finalize()


def train_reader(run: RunContext) -> Reader:
    """The training reader, made anew where it may hold constants of layers from before `begin`."""
    if not any(
        hasattr(layer, "finalize_state") for layer in run.state.task_state.layers
    ):
        return run.train_reader
    with run.world.fail_together("reading the training data"):
        return task_checks.reader(run.task, run.train_source, training=True)


class Start(NamedTuple):
    """Where a run begins, the same on every rank.

    `source`: "new" weights (of the seed, of --init_from or --backbone_weights), or a checkpoint
    of this run's "own" folder or of "other" ones.
    """

    place: Place
    source: Literal["new", "own", "other"]
    checkpoint: CheckpointInfo | None = None

    @property
    def step(self) -> int:
        return self.place.step

    @property
    def path(self) -> Path | None:
        return self.checkpoint.path if self.checkpoint else None


def begin(context: RunContext, checkpoint: CheckpointInfo | None) -> Start:
    """Gives all variables on every rank the values of the run's start.

    `checkpoint`: what `find_start` found. Raises Stop: on all ranks, when it, or what --init_from
    or --backbone_weights names, cannot be read or does not fit the model.
    """
    config = context.config
    world = context.world
    state = context.state
    if checkpoint:
        context.checkpoints.restore(checkpoint, state.variables, config)
    elif config.init_from or config.backbone_weights:
        metric = scores.of_task(context.task)
        with world.fail_together("reading the first weights"):
            if world.is_chief and config.init_from:
                warm_start.start(
                    context.model,
                    config,
                    task_state=state.task_state,
                    metric=metric,
                    class_names=context.checkpoints.card.get("class_names") or [],
                )
            elif world.is_chief:
                warm_start.load_backbone(context.model, config)
            if world.is_chief:
                begin_optimizer(context)
    bring_to_all(world, state)
    if schedule.by_plateau(context.task, config):
        state.plateau.measures(context.checkpoints.measure)
        value = context.checkpoints.score_of(checkpoint) if checkpoint else None
        # The score came after the checkpoint was written.
        if checkpoint and value is not None:
            judge_plateau(context, value=value, step=checkpoint.step)
    if not checkpoint:
        return Start(BEGINNING, "new")
    return Start(checkpoint.place, "own" if checkpoint.is_own else "other", checkpoint)
