"""report.html and compare.py: of a real run, of made-up ones, and of what is no run."""

import gzip
import html
import json
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import hvdkit
from hvdkit import settings as settings_lib
from hvdkit import whole_files
from hvdkit.evaluate import metrics
from hvdkit.observe import compare, records, report
from hvdkit.run import loop
from ranks import PROJECT, launch_well

FLAGS = [
    "--flagfile=configs/blank.cfg",
    "--num_steps=6",
    "--log_every=1",
    "--eval_every=3",
]
FLAGS += ["--checkpoint_every=3", "--trackers=", "--profile=5:6:all"]


class Page:
    """The texts of a page, what it links to, and the names of its figures."""

    def __init__(self, page: str) -> None:
        texts = re.sub(
            r"<[^>]*>", "\n", re.sub(r"<style.*?</style>", "", page, flags=re.DOTALL)
        )
        self.text = html.unescape(texts).split("\n")
        self.links = re.findall(r' (?:src|href|xlink:href)="([^"]*)"', page)
        labels = re.findall(r' aria-label="([^"]*)"', page)
        self.figures = [html.unescape(label) for label in labels]


def page_of(folder: Path) -> Page:
    return Page((folder / "report.html").read_text())


def call(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hvdkit", *(str(word) for word in words)]
    return subprocess.run(
        command, cwd=PROJECT, capture_output=True, text=True, timeout=100
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("report") / "run"
    ended = launch_well(2, ["train.py", *FLAGS, f"--run_dir={run}"], "gloo")
    assert f"report: {run}/report.html" in ended.output
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", ended.output), "a log is plain text"
    return run


def test_scores_of_another_measure_are_not_compared(tmp_path):
    (tmp_path / "config.cfg").touch()
    starts = [(0, "a"), (4, "b"), (8, "b")]
    lines = [
        json.dumps({"step": number, "time": 1.0, "score": "iou", "measure": measure})
        for number, measure in starts
    ]
    (tmp_path / "starts.jsonl").write_text("\n".join(lines))
    scores = [(2, 0.9), (4, 0.5), (6, 0.7), (10, 0.6)]
    lines = [
        json.dumps({"step": number, "eval_loss": 1.0, "eval_iou": score})
        for number, score in scores
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    run = records.read(tmp_path)
    assert [score.step for score in run.scored()] == [4, 6, 10]
    assert run.best().step == 6


@pytest.mark.parametrize(
    ("measures", "compared"), [("aa", True), ("ab", False), (("a", None), True)]
)
def test_the_time_to_a_score_is_of_one_measure(measures, compared):
    runs = []
    for number, measure in enumerate(measures):
        start = {"step": 0, "time": 1.0, "score": "iou", "measure": measure}
        line = {"step": 4, "eval_loss": 1.0, "eval_iou": 0.5, "time": 2.0}
        runs.append(records.Records(Path(str(number)), {}, [line], [start], {}))
    names = [name for name, *_ in compare.side_by_side(runs, None)]
    assert ("to a score of 0.5" in names) == compared
    assert "to a score of 0.4" in [row[0] for row in compare.side_by_side(runs, 0.4)]


def test_what_is_too_large_for_the_page_is_left_out_alone(
    trained, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "confusion.csv").write_text("x" * 2000)
    (run / "predictions.png").write_text("x" * 2000)
    monkeypatch.setattr(whole_files, "JSON_BYTES", 1999)
    monkeypatch.setattr(whole_files, "TABLE_BYTES", 1999)
    (run / "summary.json").unlink()
    (run / "profile" / "operations.json").unlink(missing_ok=True)
    report.write(run)
    text = " ".join(page_of(run).text)
    assert "confusion.csv is not shown" in text
    assert "predictions.png is not shown" in text


def test_a_run_ends_with_a_page_that_needs_no_other_file(trained):
    page = page_of(trained)
    summary = json.loads((trained / "summary.json").read_text())
    text = " ".join(page.text)
    for words in (summary["weights_sha256"], "2 ranks on 1 host(s)", "6 of 6", "blank"):
        assert words in text, words
    assert {"training", "validation"} <= {*page.text}  # one plot has both losses
    assert all(link.startswith(("data:", "#")) for link in page.links), page.links
    assert {"Loss", "Learning rate", "A rank's own seconds a step"} <= set(page.figures)
    markup = (trained / "report.html").read_text()
    assert (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:;" in markup
    )
    assert "<script" not in markup and "script-src" not in markup


def test_profiled_steps_have_a_record_on_each_rank_and_a_table_in_the_page(trained):
    for rank in range(2):
        [record] = (trained / f"profile/rank-{rank}").glob(
            "plugins/profile/*/*.xplane.pb"
        )
        with gzip.open(record.with_name("trace.json.gz"), "rt") as file:
            events = json.load(file)["traceEvents"]
        products = [event for event in events if "MatMul" in event["name"]]
        assert len(products) >= 2 * 3, (
            "each step has two products forward and more backward"
        )
        assert all(event["ph"] == "X" and event["dur"] >= 0 for event in products)

    rows = json.loads((trained / "profile/operations.json").read_text())
    costs = [row["ms_a_step"] for row in rows]
    assert (
        costs == sorted(costs, reverse=True)
        and 0.5 < sum(row["share"] for row in rows) <= 1.001
    )
    shown = page_of(trained).text
    assert "Where the time of a step goes" in shown
    assert rows[0]["operation"] in shown and rows[10]["operation"] not in shown


def made_up(folder: Path, lines: list[dict], starts: list[dict], **summary) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.cfg").write_text(
        "# settings\n--task=t\n--num_steps=100\n--nobenchmark\n"
    )
    text = "".join(json.dumps(line) + "\n" for line in lines)
    # A kill cut this line.
    (folder / "metrics.jsonl").write_text(text + '{"step": 3, "lo')
    (folder / "starts.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in starts)
    )
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def step(number: int, time: float, **figures) -> dict:
    return {"step": number, "loss": 1 / number, "lr": 0.1, "time": time, **figures}


def test_time_lost_is_from_the_last_record_kept_to_the_next_start(tmp_path):
    lines = [step(10, 110.0), step(20, 120.0), step(30, 205.0)]
    starts = [{"step": 0, "time": 100.0, "where": "4 ranks"}, {"step": 0}]
    starts += [{"step": 20, "time": 180.0, "where": "3 ranks"}]
    run = records.read(made_up(tmp_path / "run", lines, starts))
    text = "".join(report.faults(run))
    # 120 to 180: lost work, and the break.
    assert "0:01:00" in text and "3 ranks" in text


def test_names_that_are_markup_numbers_that_are_none_and_long_runs(tmp_path):
    lines = [
        step(n, 100.0 + n, grad_norm=None if n % 3 else 2.0) for n in range(1, 30_000)
    ]
    lines[7]["loss"] = None
    lines += [
        {
            "step": 5,
            "eval_loss": None,
            "eval_miou": 0.5,
            "eval_iou_0": None,
            "time": 9.0,
        }
    ]
    folder = made_up(
        tmp_path / '<b>"&', lines, [{"step": 0, "time": 99.0, "what": "<i>"}]
    )
    names = ["<script>", "$one^", "漢字\udce9"]
    counts = np.array([[0, 0, 0], [1, 5, 2], [0, 1, 4]])
    metrics.write_confusion(folder / "confusion.csv", names, counts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert report.main(["hvdkit report", str(folder)]) == 0
    page = page_of(folder)
    text = " ".join(page.text)
    for words in ("$one^", "漢字", "<script>", "<i>", '<b>"&: not ended, step 29,999'):
        assert words in text, words
    assert "IoU of each class" in page.figures
    assert (folder / "report.html").stat().st_size < 600_000


def test_a_run_without_a_page_is_compared_with_another(trained, tmp_path, capsys):
    """A page that cannot be written does not end the run."""
    other = tmp_path / "other"
    page = tmp_path / "compared.html"
    shutil.copytree(trained, other, ignore=shutil.ignore_patterns("report.html"))
    with (other / "config.cfg").open("a") as file:
        file.write("--base_lr=0.5\n")
    summary = json.loads((other / "summary.json").read_text())
    (other / "summary.json").write_text(
        json.dumps(summary | {"weights_sha256": "0" * 64})
    )
    loop._report(tmp_path)
    assert "note: no report: ValueError" in capsys.readouterr().out
    compared = call("compare", trained, other, f"--html={page}", "--score=0.01")
    assert compared.returncode == 1, compared.stderr
    rows = {line.split("  ")[0]: line for line in compared.stdout.splitlines()}
    assert rows["--base_lr"].split()[1:] == [
        records.read(trained).settings["base_lr"],
        "0.5",
    ]
    assert "--run_dir" not in rows and "--task" not in rows
    assert re.search(
        r"to a score of 0.01\s+step 3, [\d.]+ s\s+step 3, ", compared.stdout
    )
    drawn = Page(page.read_text())
    report = (trained / "report.html").read_bytes()
    other_page = call("compare", trained, other, f"--html={trained}/report.html")
    assert (
        other_page.returncode == 2
        and "report.html is a file that this" in other_page.stderr
    )
    assert (trained / "report.html").read_bytes() == report
    assert {"Training loss", "Learning rate"} <= set(drawn.figures)
    assert all(link.startswith(("data:", "#")) for link in drawn.links)


def test_runs_of_other_tasks_and_folders_of_any_bytes_are_compared(tmp_path):
    def run_of(name: str, score: str) -> Path:
        start = {"step": 0, "time": 1.0, "ranks": 1, "score": score}
        evaluation = {"step": 1, "eval_loss": 1.0, f"eval_{score}": 0.5, "time": 3.0}
        return made_up(tmp_path / name, [step(1, 2.0), evaluation], [start])

    one = run_of("a", "miou")
    other = run_of("\udcff", "accuracy")
    compared = call("compare", one, other, f"--html={tmp_path}/page.html")
    assert "Traceback" not in compared.stderr, compared.stderr
    assert f"page: {tmp_path}" in compared.stdout
    # 0.5 of mIoU is not 0.5 of accuracy: no row says which was first, unless it is asked for.
    assert "to a score of" not in compared.stdout
    assert "to a score of 0.4" in call("compare", one, other, "--score=0.4").stdout
    command = f"{sys.executable} -m hvdkit compare {one} {one} | true"
    head = subprocess.run(
        ["sh", "-c", command], cwd=PROJECT, capture_output=True, timeout=100
    )
    assert not head.stderr  # a pipe that closes early leaves no traceback


def test_of_an_error_the_lowest_is_the_best_of_a_run(tmp_path):
    def run_of(name: str, errors: list[float]) -> Path:
        start = {"step": 0, "time": 1.0, "score": "mae", "score_mode": "min"}
        lines = [step(1, 2.0)]
        for number, error in enumerate(errors, start=1):
            lines.append(
                {
                    "step": number,
                    "eval_loss": 1.0,
                    "eval_mae": error,
                    "time": 3.0 + number,
                }
            )
        return made_up(tmp_path / name, lines, [start])

    one = run_of("a", [9.0, 2.0, 5.0])
    other = run_of("b", [4.0, 3.0, 8.0])
    table = call("compare", one, other).stdout
    assert re.search(r"best score +mae 2.0000, step 2 +mae 3.0000, step 2", table), (
        table
    )
    # Both have the worse of their bests.
    assert re.search(r"to a score of 3 +step 2, 4.0 s +step 2, 4.0 s", table), table
    call("report", one)
    assert "mae (the lowest is the best): 2.0000, of step 2" in page_of(one).text
    table = call("compare", one, other, "--score=4").stdout
    assert re.search(r"to a score of 4 +step 2, 4.0 s +step 1, 3.0 s", table), table


def test_of_equal_scores_the_lower_loss_is_the_best_of_a_run(tmp_path):
    start = {"step": 0, "time": 1.0, "score": "accuracy", "score_mode": "max"}
    lines = [step(1, 2.0)]
    for number, loss in enumerate((0.3, 0.1, 0.2, None), start=1):
        line = {"step": number, "eval_loss": loss, "eval_accuracy": 0.5, "time": 3.0}
        lines.append(line if loss else line | {"eval_accuracy": None})
    run = records.read(made_up(tmp_path / "run", lines, [start]))
    assert run.best().step == 2
    # What the run itself found out counts, where it ended: it knows what its scores measure.
    ended = made_up(
        tmp_path / "ended", lines, [start], step=4, best_score=0.4, best_step=3
    )
    assert records.read(ended).best()[:2] == (0.4, 3)


def test_a_switch_whose_name_begins_with_no_is_read_as_it_is(tmp_path, monkeypatch):
    class Settings(hvdkit.Settings):
        noisy: bool = hvdkit.setting(False, "a switch of a fork")

    monkeypatch.setattr(settings_lib, "of_project", lambda: Settings)
    (tmp_path / "config.cfg").write_text("--noisy\n--nojit\n")
    assert records.read(tmp_path).settings == {"noisy": "on", "jit": "off"}
    (tmp_path / "config.cfg").write_text("--nonoisy\n")
    assert records.read(tmp_path).settings == {"noisy": "off"}


def test_a_tasks_own_figure_is_a_score_whatever_its_name_begins_with():
    names = ["loss", "loss_rate", "iou_3", "iou_mean", "accuracy"]
    line = {"step": 1} | {f"eval_{name}": 0.5 for name in names}
    run = records.Records(Path("run"), {}, [line], [], {})
    assert list(run.scores()) == ["loss_rate", "iou_mean", "accuracy"]


def test_lines_are_read_one_by_one_and_what_no_run_writes_is_passed_over(tmp_path):
    file = tmp_path / "metrics.jsonl"
    long = json.dumps({"step": 2, "text": "x" * 2**21})
    file.write_text('{"step": 1}\n' + long + '\n{"step": 3}\n{"step": 4}\n{"st')
    steps = [line and line["step"] for line in records.each_line(file)]
    assert steps == [1, None, 3, 4, None]
    assert [line["step"] for line in records.lines(file)] == [1, 3, 4]
    with file.open("r+b") as sparse:  # Larger than what is read of other files at once.
        sparse.truncate(whole_files.LINES_BYTES + 1)
    assert [line["step"] for line in records.lines(file)] == [1, 3, 4]
