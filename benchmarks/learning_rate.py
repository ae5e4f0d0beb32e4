"""Is the rate that --find_lr suggests a good one? On four real tasks, beside a sweep of rates.

    python benchmarks/learning_rate.py [--tasks=digits,demo,tokens,tabular]

A score is the task's metric (accuracy; mIoU of the demo) after the last step, on one rank on CPUs.
Each run is as long as the others, and differs from them by --base_lr alone.
"""

import argparse
import csv
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RATES = [10 ** (exponent / 2) for exponent in range(-8, 1)]
SHORT = "--eval_every=0 --checkpoint_every=0 --weight_decay=0.0001 --trackers="
TASKS = {
    "digits": "--flagfile=configs/digits.cfg --optimizer=sgd --num_steps=400 --warmup_steps=20",
    "demo": "--flagfile=configs/demo.cfg --num_steps=200 --warmup_steps=20 --global_batch_size=16",
    "tokens": "--task=tokens --optimizer=adam --num_steps=400 --warmup_steps=40",
    "tabular": "--task=tabular --optimizer=adam --num_steps=300 --warmup_steps=30 --num_classes=2",
}


def project(folder: Path) -> None:
    """A project with all four tasks, and scikit-learn's breast cancer data as a table."""
    from sklearn.datasets import load_breast_cancer

    shutil.copytree(ROOT / "template", folder, symlinks=False, dirs_exist_ok=True)
    shutil.copy(ROOT / "examples/tokens/task.py", folder / "tasks/tokens.py")
    cancer = load_breast_cancer()
    columns = {
        "NUMBERS": tuple(str(name) for name in cancer.feature_names),
        "WORDS": (),
        "LABEL": "label",
    }
    code = (ROOT / "examples/tabular/tabular.py").read_text()
    for name, value in columns.items():
        code = re.sub(rf"(?m)^{name} = .*", f"{name} = {value!r}", code)
    (folder / "tasks/tabular.py").write_text(code)

    rows = [[*row, label] for row, label in zip(cancer.data, cancer.target)]
    names = [*cancer.feature_names, "label"]
    (folder / "datasets/tabular").mkdir(parents=True)
    for split, rows_of_split in (("train", rows[::2]), ("val", rows[1::2])):
        with open(folder / f"datasets/tabular/{split}.csv", "w") as file:
            csv.writer(file).writerows([names, *rows_of_split])


def trained(folder: Path, task: str, *flags: str) -> str:
    """What the run printed, "" if it diverged; ends this program where it fails otherwise."""
    command = [sys.executable, "train.py", *TASKS[task].split(), *SHORT.split(), *flags]
    command.append(f"--data_dir=datasets/{task}")
    ended = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False
    )
    if ended.returncode not in (0, 3):
        sys.exit(
            f"error: {' '.join(command)}: exit code {ended.returncode}: {ended.stderr}"
        )
    return ended.stdout if ended.returncode == 0 else ""


def score(folder: Path, task: str, rate: float) -> float:
    """The score of a run with that rate; 0 if it diverged."""
    from hvdkit.commands.jobs import seeds

    run = folder / "runs" / f"{task}-{rate:g}"
    output = trained(folder, task, f"--base_lr={rate:g}", f"--run_dir={run}")
    if not output:
        return 0.0
    _, result = seeds.score(run)
    return result.value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", default=",".join(TASKS))
    tasks = parser.parse_args().tasks.split(",")
    unknown = set(tasks) - set(TASKS)
    if unknown:
        parser.error(f"no task {sorted(unknown)}; there are {list(TASKS)}")
    folder = Path(tempfile.mkdtemp(prefix="learning-rate-"))
    project(folder)
    print(
        "| task | suggested | its score | best of sweep | its score | share | sweep's scores |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for task in tasks:
        output = trained(folder, task, "--find_lr", f"--run_dir={folder}/runs/{task}")
        suggested = float(re.search(r"try --base_lr=([\d.e+-]+):", output)[1])
        its_score = score(folder, task, suggested)
        scores = {rate: score(folder, task, rate) for rate in RATES}
        best = max(scores, key=scores.get)
        swept = ", ".join(f"{rate:.0e}: {value:.3f}" for rate, value in scores.items())
        print(
            f"| {task} | {suggested:.1e} | {its_score:.4f} | {best:.1e} | {scores[best]:.4f} "
            f"| {its_score / scores[best]:.3f} | {swept} |",
            flush=True,
        )
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
