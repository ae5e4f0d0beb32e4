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
    found = load_breast_cancer()
    columns = {"NUMBERS": tuple(map(str, found.feature_names)), "WORDS": (), "LABEL": "label"}
    code = (ROOT / "examples/tabular/tabular.py").read_text()
    for name, value in columns.items():
        code = re.sub(rf"(?m)^{name} = .*", f"{name} = {value!r}", code)
    (folder / "tasks/tabular.py").write_text(code)
    rows = [[*row, label] for row, label in zip(found.data, found.target)]
    names = [*found.feature_names, "label"]
    (folder / "datasets/tabular").mkdir(parents=True)
    for split, part in (("train", rows[::2]), ("val", rows[1::2])):
        with open(folder / f"datasets/tabular/{split}.csv", "w") as file:
            csv.writer(file).writerows([names, *part])


def trained(folder: Path, task: str, *more: str) -> str:
    """What the run printed; ends this program where it does not end well, or by a bad rate."""
    words = [sys.executable, "train.py", *TASKS[task].split(), *SHORT.split(), *more]
    words += [f"--data_dir=datasets/{task}"]
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if ended.returncode not in (0, 3):
        sys.exit(f"error: {' '.join(words)}: exit code {ended.returncode}: {ended.stderr}")
    return ended.stdout if ended.returncode == 0 else ""


def score(folder: Path, task: str, rate: float) -> float:
    from hvdkit.commands.jobs import seeds

    run = folder / "runs" / f"{task}-{rate:g}"
    printed = trained(folder, task, f"--base_lr={rate:g}", f"--run_dir={run}")
    return seeds.score(run)[1].value if printed else 0.0  # 0: it diverged


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--tasks", default=",".join(TASKS))
    own = made.parse_args()
    if unknown := {*own.tasks.split(",")} - {*TASKS}:
        made.error(f"no task {sorted(unknown)}; there are {[*TASKS]}")
    folder = Path(tempfile.mkdtemp(prefix="learning-rate-"))
    project(folder)
    print("| task | suggested | its score | best of sweep | its score | share | sweep's scores |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for task in own.tasks.split(","):
        printed = trained(folder, task, "--find_lr", f"--run_dir={folder}/runs/{task}")
        rate = float(re.search(r"try --base_lr=([\d.e+-]+):", printed)[1])
        mine, scores = score(folder, task, rate), {r: score(folder, task, r) for r in RATES}
        best = max(scores, key=scores.get)
        row = f"{task} | {rate:.1e} | {mine:.4f} | {best:.1e} | {scores[best]:.4f}"
        swept = ", ".join(f"{r:.0e}: {s:.3f}" for r, s in scores.items())
        print(f"| {row} | {mine / scores[best]:.3f} | {swept} |", flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
