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
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
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
from hvdkit.run import load_run
from hvdkit.run.context import RunContext
from hvdkit.settings import Settings
from hvdkit.settings.typed import path_argument
from hvdkit.stop import PREEMPTED, Stop
from hvdkit.train import task as tasks
from hvdkit.train import task_checks

WRITTEN = ("evaluation.json", "classes.csv", "confusion.csv", "worst")  # in --out


class Worst:
    """The samples with the largest mean loss."""

    def __init__(self, run: RunContext, most: int, rounds: int) -> None:
        self._run, self._most, self._rounds, self._done = run, most, rounds, 0
        self._found: list[tuple[float, int]] = []  # loss, and the sample's number, negated

    def add(self, means: np.ndarray, ids: list[int]) -> None:
        """Takes a batch of this rank, as Evaluator.on_batch."""
        # NaN is the worst; among equal losses the first sample.
        ranked = np.where(np.isnan(means), np.inf, means).tolist()
        self._found += [(loss, -number) for loss, number in zip(ranked, ids, strict=True)]
        self._found = heapq.nlargest(self._most, self._found)
        self._done += 1
        if self._run.world.is_chief:
            logs.progress("batches", self._done, self._rounds)

    def of_all_ranks(self) -> list[tuple[float, int]]:
        """Loss and number of each, the worst first; every rank must call it."""
        everyone = self._run.world.gather_objects(self._found, "evaluate.worst")
        worst = heapq.nlargest(self._most, (pair for own in everyone for pair in own))
        return [(loss, -number) for loss, number in worst]


def evaluate(config: Settings, world: World, stop_signal: StopSignal, *, own: Any) -> None:
    """Every rank must call it; rank 0 writes. Raises Stop, on all ranks, if it cannot be done."""
    run, path = load_run.restored(config, world, own.checkpoint)
    with world.fail_together("reading the validation data"):
        reader = task_checks.reader(run.task, run.val_source, training=False)
        share = {"rank": world.rank, "size": world.size}
        share["workers"] = config.data_workers or world.threads
        feed = EvaluationFeed(run.val_source, reader, config.eval_batch_size, **share)
    evaluator, worst = Evaluator(run, feed), Worst(run, own.worst, feed.rounds)
    evaluator.try_out()
    with world.fail_together("reading the settings"):
        tasks.check_read(run.task, config, tasks.EVALUATION)
    evaluator.on_batch = worst.add
    step = int(run.state.step)
    averaged = own.ema and bool(run.state.averages)
    split = config.val_split.replace("/", "-")
    out = own.out or Path(config.run_dir) / "evaluation" / f"step-{step:08d}-{split}"
    with contextlib.ExitStack() as replacing:
        made = Path()
        with world.fail_together(f"writing {out}"):  # known before what may take hours
            if world.is_chief:
                inputs = [path, Path(config.data_dir)]
                made = replacing.enter_context(_replaced(own.out, out, inputs))
        weights = run.state.averaged_weights() if averaged else nullcontext()
        with weights:
            found = evaluator.run(lambda: stop_signal.asked)
            if found is None:
                raise Stop(PREEMPTED, "stopped before the end: nothing was written")
            samples = worst.of_all_ranks()
            with world.fail_together(f"writing {out}"):
                if world.is_chief:
                    about = {"checkpoint": str(path), "step": step, "averaged": averaged}
                    about |= {"split": config.val_split, "samples": len(run.val_source)}
                    about["measure"] = dict(run.checkpoints.measure)
                    about["chose_checkpoint"] = own.checkpoint == "best" and chosen_by(run, path)
                    write(run, made, about=about, found=found, worst=samples)
                    pictures(run, evaluator, out=made / "worst", worst=samples)
        with world.fail_together(f"writing {out}"):
            replacing.pop_all().close()
    say(world, f"written: {out}")


@contextlib.contextmanager
def _replaced(asked: Path | None, out: Path, inputs: Sequence[Path]) -> Iterator[Path]:
    """Yields a folder for the files, which are then those of `out`; `asked`: --out."""
    if not asked and out.parent.is_symlink():
        raise ValueError(f"{out.parent} is a link, which is not followed: give --out")
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with (
            whole_files.held(out.resolve() if asked else out) as held,
            whole_files.replaced(held, WRITTEN, inputs=inputs) as made,
        ):
            yield made
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # it holds what was written
                out.rmdir()


def chosen_by(run: RunContext, path: Path) -> bool:
    """Whether scores of these samples chose the checkpoint as the best; it then tells."""
    name = "the validation data's fingerprint"
    if same := files.read_manifest(path).measure.get(name) == run.checkpoints.measure[name]:
        chose = f"note: these samples ({run.config.val_split}) chose this checkpoint as the best"
        print(f"{chose}: of others expect less (--split=test, where the data have one)")
    return same


def write(
    run: RunContext, out: Path, *, about: dict[str, Any], found: Evaluation, worst: Sequence[tuple]
) -> None:
    """Writes all but pictures of samples; prints the figures of each class."""
    file_of = getattr(run.val_source, "picture_file", lambda number: "")
    samples = [{"sample": n, "loss": loss, "file": str(file_of(n))} for loss, n in worst]
    about = about | {"figures": found.figures, "worst": samples}
    whole_files.write_json(out / "evaluation.json", about)
    confusion = found.confusion()
    for name, value in found.figures.items():
        if confusion is None or not is_of_class(name):
            print(f"{name:>16}  {value:.6g}")
    if confusion is None:
        return
    names = metrics.class_names(len(confusion), run.val_source, run.train_source)
    metrics.write_confusion(out / "confusion.csv", names, confusion)
    columns = metrics.class_figures(confusion)
    rows = list(zip(names, *columns.values()))
    whole_files.write_csv(out / "classes.csv", [["class", *columns], *rows])
    print(f"{'class':>16}  {'  '.join(f'{name:>9}' for name in columns)}")
    for name, labels, *shares in rows:
        cells = "  ".join(f"{share:9.4g}" for share in shares)
        print(f"{logs.printable(name[:16]):>16}  {labels:9.0f}  {cells}")


def pictures(run: RunContext, evaluator: Evaluator, *, out: Path, worst: Sequence[tuple]) -> None:
    """Draws each of the worst samples, with the weights that were evaluated."""
    draw = tasks.optional(run.task, "draw")
    if not draw or not worst:
        return
    out.mkdir()
    for place, (loss, number) in enumerate(worst, start=1):
        batch, outputs = evaluator.one(number)
        with task_checks.user_code_errors("draw"):
            sheet = np.concatenate(list(draw(batch["inputs"], batch["targets"], outputs)))
        name = f"{place:02d}-sample-{number}-loss-{loss:.3g}.png"
        Image.fromarray(sheet).save(out / name, "PNG")


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 2 wrong use, 75 stopped."""
    made = load_run.parser(__doc__)
    made.add_argument("--split", default="", help="split of the data; default: that of the run")
    made.add_argument("--worst", type=int, default=8, help="worst samples to draw; 0: none")
    made.add_argument(
        "--out", type=path_argument, help="output folder; default: evaluation/ in run_dir"
    )
    own, flags = made.parse_known_args(argv[1:])
    if own.split:
        flags = [f"--val_split={own.split}", *flags]
    config = load_run.settings(own.run_dir, flags)
    return load_run.on_ranks(config, own, evaluate)
