"""Evaluates a checkpoint of a run: overall scores, scores of each class, the worst samples.

    hvdkit evaluate --run_dir=runs/demo                    the best checkpoint, one rank
    hvdkit evaluate --run_dir=runs/demo --split=test       samples that chose no checkpoint
    horovodrun -np 2 hvdkit evaluate --run_dir=runs/demo --checkpoint=last --split=train

The scores equal those that the run logged, on any number of ranks. Flags of train.py may follow:
--data_dir if the data have moved; --eval_flip, --eval_scales and the like for other scores.
It writes to --out: evaluation.json, classes.csv, confusion.csv, and pictures of the samples with
the largest loss. What an earlier evaluation left there is replaced at the end; what somebody else
put there under these names is refused.
"""

import contextlib
import heapq
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hvdkit import logs, whole_files
from hvdkit.checkpoint import files
from hvdkit.data.pipeline import EvaluationFeed
from hvdkit.evaluate import metrics
from hvdkit.evaluate.evaluator import Evaluation, Evaluator
from hvdkit.observe.records import is_of_class
from hvdkit.ranks.interrupt import StopSignal
from hvdkit.ranks.world import World, say
from hvdkit.run import load_run, sample_figures
from hvdkit.run.context import RunContext
from hvdkit.settings import Settings
from hvdkit.settings.typed import path_argument
from hvdkit.stop import PREEMPTED, Stop
from hvdkit.train.task import checks as task_checks
from hvdkit.train.task import protocol as tasks

WRITTEN = ("evaluation.json", "classes.csv", "confusion.csv", "worst")  # names in --out


class WorstSamples:
    """The samples with the largest mean loss."""

    def __init__(self, run: RunContext, *, count: int, rounds: int) -> None:
        self._run = run
        self._count = count
        self._rounds = rounds  # how many batches a rank evaluates, for the progress bar
        self._rounds_done = 0
        # A pair is a loss and a sample, its number negated: of equal losses the first is worse.
        self._worst: list[tuple[float, int]] = []

    def add(self, means: np.ndarray, ids: list[int]) -> None:
        """Takes a batch of this rank, as Evaluator.on_batch.

        `means`: the mean loss of each sample; NaN counts as the worst. `ids`: the samples' numbers.
        Raises ValueError where the loss has left out samples.
        """
        losses = np.where(np.isnan(means), np.inf, means).tolist()
        if self._count and len(losses) != len(ids):
            raise ValueError(
                f"the task's loss returns {len(losses)} losses for {len(ids)} samples, so nobody "
                "knows which are the worst: return one for each, with weight 0 for what does not "
                "count, or use --worst=0"
            )
        self._worst += [(loss, -number) for loss, number in zip(losses, ids)]
        self._worst = heapq.nlargest(self._count, self._worst)
        self._rounds_done += 1
        if self._run.world.is_chief:
            logs.progress("batches", self._rounds_done, self._rounds)

    def of_all_ranks(self) -> list[tuple[float, int]]:
        """Loss and number of each, the worst first; every rank must call it."""
        worst_of_ranks = self._run.world.gather_objects(self._worst, "evaluate.worst")
        worst = heapq.nlargest(
            self._count, itertools.chain.from_iterable(worst_of_ranks)
        )
        return [(loss, -number) for loss, number in worst]


def evaluate(
    config: Settings, world: World, stop_signal: StopSignal, *, arguments: Any
) -> None:
    """Every rank must call it; rank 0 writes. Raises Stop, on all ranks, if it cannot be done."""
    run, checkpoint = load_run.restored(config, world, arguments.checkpoint)
    with world.fail_together("reading the validation data"):
        feed = EvaluationFeed(
            task_checks.reader(run.task, run.val_source, training=False),
            config.eval_batch_size,
            rank=world.rank,
            size=world.size,
            workers=config.data_workers or world.threads,
        )
    evaluator = Evaluator(run, feed)
    evaluator.try_out()
    sample_figures.say_on_restart(
        run, evaluator, reader=feed.reader, checkpoint=checkpoint
    )
    with world.fail_together("reading the settings"):
        tasks.check_read(run.task, config, tasks.EVALUATION)
    worst = WorstSamples(run, count=arguments.worst, rounds=feed.rounds)
    evaluator.on_batch = worst.add

    step = int(run.state.step)
    split = config.val_split.replace("/", "-")
    out = (
        arguments.out
        or Path(config.run_dir) / "evaluation" / f"step-{step:08d}-{split}"
    )
    averaged = arguments.ema and bool(run.state.averages)
    about = {
        "checkpoint": str(checkpoint),
        "step": step,
        "averaged": averaged,
        "split": config.val_split,
        "samples": len(run.val_source),
        "measure": dict(run.checkpoints.measure),
    }
    replaced = _replaced(arguments.out, out, inputs=[checkpoint, Path(config.data_dir)])
    weights = run.state.averaged_weights() if averaged else contextlib.nullcontext()
    with load_run.written_by_chief(world, out, replaced) as folder, weights:
        evaluation = evaluator.run(lambda: stop_signal.asked)
        if evaluation is None:
            raise Stop(PREEMPTED, "stopped before the end: nothing was written")
        samples = worst.of_all_ranks()
        with world.fail_together("writing ", path=out):
            if world.is_chief:
                is_best = arguments.checkpoint == "best"
                about["chose_checkpoint"] = is_best and _chosen_by_samples(
                    run, checkpoint
                )
                _write(run, folder, about=about, evaluation=evaluation, worst=samples)
                _write_pictures(run, evaluator, folder=folder / "worst", worst=samples)
    say(world, f"written: {out}")


@contextlib.contextmanager
def _replaced(
    asked_for: Path | None, out: Path, inputs: Sequence[Path]
) -> Iterator[Path]:
    """Yields a folder for the files, which then replace those of `out`; `asked_for`: --out."""
    if not asked_for and out.parent.is_symlink():
        raise ValueError(f"{out.parent} is a link, which is not followed: give --out")
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with (
            whole_files.held(out.resolve() if asked_for else out) as held,
            whole_files.replaced(held, WRITTEN, inputs=inputs) as folder,
        ):
            yield folder
    finally:
        if is_new:
            # The folder stays where something was written into it.
            with contextlib.suppress(OSError):
                out.rmdir()


def _chosen_by_samples(run: RunContext, checkpoint: Path) -> bool:
    """Whether scores of these samples chose the checkpoint as the best; a note then says so."""
    name = "the validation data's fingerprint"
    measure = files.read_manifest(checkpoint).measure
    is_same = measure.get(name) == run.checkpoints.measure[name]
    if is_same:
        print(
            f"note: these samples ({run.config.val_split}) chose this checkpoint as the best: "
            "of others expect less (--split=test, where the data have one)"
        )
    return is_same


def _write(
    run: RunContext,
    folder: Path,
    *,
    about: dict[str, Any],
    evaluation: Evaluation,
    worst: Sequence[tuple[float, int]],
) -> None:
    """Writes all but pictures of samples; prints the figures of each class."""
    file_of = getattr(run.val_source, "picture_file", lambda number: "")
    samples = []
    for loss, number in worst:
        samples.append({"sample": number, "loss": loss, "file": str(file_of(number))})
    figures = evaluation.figures
    content = about | {"figures": figures, "worst": samples}
    whole_files.write_json(folder / "evaluation.json", content)

    confusion = evaluation.confusion()
    for name, value in figures.items():
        if confusion is None or not is_of_class(name):
            print(f"{name:>16}  {value:.6g}")
    if confusion is None:
        return
    names = metrics.class_names(len(confusion), run.val_source, run.train_source)
    metrics.write_confusion(folder / "confusion.csv", names, confusion)
    columns = metrics.class_figures(confusion)
    rows = list(zip(names, *columns.values()))
    whole_files.write_csv(folder / "classes.csv", [["class", *columns], *rows])

    heads = "  ".join(f"{name:>9}" for name in columns)
    print(f"{'class':>16}  {heads}")
    for name, labels, *shares in rows:
        cells = "  ".join(f"{share:9.4g}" for share in shares)
        print(f"{logs.printable(name[:16]):>16}  {labels:9.0f}  {cells}")


def _write_pictures(
    run: RunContext,
    evaluator: Evaluator,
    *,
    folder: Path,
    worst: Sequence[tuple[float, int]],
) -> None:
    """Draws each of the worst samples, with the weights that were evaluated."""
    draw = tasks.optional(run.task, "draw")
    if not draw or not worst:
        return
    folder.mkdir()
    for place, (loss, number) in enumerate(worst, start=1):
        batch, outputs = evaluator.one(number)
        with task_checks.user_code_errors("draw"):
            sheet = np.concatenate(
                list(draw(batch["inputs"], batch["targets"], outputs))
            )
        name = f"{place:02d}-sample-{number}-loss-{loss:.3g}.png"
        Image.fromarray(sheet).save(folder / name, "PNG")


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 2 wrong use, 75 stopped."""
    parser = load_run.parser(__doc__)
    parser.add_argument(
        "--split", default="", help="split of the data; default: that of the run"
    )
    parser.add_argument(
        "--worst", type=int, default=8, help="worst samples to draw; 0: none"
    )
    parser.add_argument(
        "--out",
        type=path_argument,
        help="output folder; default: evaluation/ in run_dir",
    )
    arguments, flags = parser.parse_known_args(argv[1:])
    if arguments.split:
        flags = [f"--val_split={arguments.split}", *flags]
    config = load_run.settings(arguments.run_dir, flags)
    return load_run.on_ranks(config, arguments, evaluate)
