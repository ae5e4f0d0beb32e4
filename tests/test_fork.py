"""Projects made from the template, as their owners meet them: files, runs, tests, updates."""

import os
import re
import shutil
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

import ranks
from projects import ROOT, make, repository, shell, tracked

TASKS = ("segmentation", "classification", "blank")
# What only some projects have, and which.
ONLY = {
    "segmentation": {
        "tasks/segmentation.py", "tasks/segmentation_models.py",
        "tasks/deeplab.py", "tests/test_deeplab.py",
        "tasks/whole_pictures.py", "tests/plain_evaluation.py",
        "tests/checks_whole_pictures.py", "tests/test_whole_pictures.py",
        "configs/voc.cfg", "configs/cityscapes.cfg", "configs/mine.cfg",
        "tests/equivalence.py", "tests/test_equivalence.py",
        "tests/checks_errors.py", "tests/test_errors.py", "tests/test_training.py",
        "tests/test_segmentation_augmentation.py",
    },
    "classification": {
        "tasks/classification.py", "tasks/classification_models.py",
        "configs/digits.cfg", "configs/cifar10.cfg", "configs/imagenet.cfg",
        "tests/test_classification.py", "tests/test_evaluate.py",
    },
    "blank": set(),
}  # fmt: skip
# What is made for the project, besides what is copied.
MADE = {".copier-answers.yml", "README.md", "LICENSE", "Dockerfile", "configs/default.cfg"}


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    return repository(tmp_path_factory.mktemp("source") / "repository")


@pytest.fixture(scope="session")
def forks(source, tmp_path_factory) -> dict[str, Path]:
    """One project for each task to start from."""
    root = tmp_path_factory.mktemp("forks")
    return {task: make(source, root / f"my-{task}", task) for task in TASKS}


def files(folder: Path) -> set[str]:
    return set(shell("git ls-files", folder).splitlines())


@pytest.mark.parametrize("task", TASKS)
def test_exactly_these_files(task, forks):
    links = {"launch", "docker", "requirements.txt", "requirements-dev.txt"}
    copied = {f.removeprefix("template/") for f in tracked() if f.startswith("template/")}
    copied -= {"tests/test_predict.py"}  # it takes both tasks
    copied = {f for f in copied - links if not f.endswith(".jinja")}
    copied |= {f for f in tracked() if f.split("/")[0] in links}
    others = set().union(*ONLY.values()) - ONLY[task]
    assert others <= copied and not ONLY[task] - copied
    assert files(forks[task]) == (copied | MADE) - others
    assert not shell("git status --porcelain --ignored", forks[task])


@pytest.mark.parametrize("task", TASKS)
def test_run_bits_and_no_links(task, forks):
    for name in files(forks[task]):
        path = forks[task] / name
        assert stat.S_ISREG(path.lstat().st_mode), name
        origin = next((p for p in (ROOT / name, ROOT / "template" / name) if p.exists()), None)
        if origin:
            assert os.access(path, os.X_OK) == os.access(origin, os.X_OK), name
    assert os.access(forks[task] / "launch" / "hosts.sh", os.X_OK)


@pytest.mark.parametrize("task", TASKS)
def test_no_placeholder_is_left_and_the_template_is_not_mentioned(task, forks):
    for name in files(forks[task]):
        if name.endswith((".png", ".lock")):
            continue
        text = (forks[task] / name).read_text()
        assert not re.search(r"\[%|%\]|\[\[ *_?\w+ *(\]\]|\|)|\{\{ *\w+ *\}\}", text), name
        if name not in (".copier-answers.yml", "README.md"):
            # Kubernetes, C++ and a package of that name have templates too.
            assert not re.search(r"(?i)(?<!uri-)\btemplate\b(?!:| <)", text), name
    readme = (forks[task] / "README.md").read_text()
    assert readme.startswith(f"# my-{task}\n") and "template" not in readme.split("## Updates")[0]
    assert "Copyright (c) Ada" in (forks[task] / "LICENSE").read_text()


@pytest.mark.parametrize("task", TASKS)
def test_lint(task, forks):
    shell("make -o setup lint", forks[task])


@pytest.mark.parametrize("task", TASKS)
def test_everything_that_is_linked_or_named_is_there(task, forks):
    fork = forks[task]
    for page in fork.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"
    for page in [p for p in fork.rglob("*") if p.suffix in (".md", ".sh", ".yaml", ".cfg")]:
        for flagfile in re.findall(r"flagfile=(configs/\w+\.cfg)", page.read_text()):
            made = ("configs/tumours.cfg", "configs/street.cfg")  # by who reads the page
            assert (fork / flagfile).exists() or flagfile in made, page
    dockerfile = (fork / "Dockerfile").read_text()
    (project,) = re.findall(r"^ARG PROJECT=(.*)$", dockerfile, re.MULTILINE)
    copies = re.findall(r"^COPY (?!--from)(?:--\S+ )*(.*) \S+$", dockerfile, re.MULTILINE)
    assert len(copies) >= 5
    for copied in " ".join(copies).replace("${PROJECT}", project).split():
        assert (fork / copied).exists(), copied


def test_names_that_make_no_project_are_refused(source, tmp_path):
    with pytest.raises(ValueError, match="a letter, then"):
        make(source, tmp_path / "x", "blank", project_name="my model")


def test_make_fork_takes_what_is_committed(tmp_path):
    """Pictures that a user left in the folder stay there; a changed file would be forgotten."""
    clone = repository(tmp_path / "clone")
    (clone / ".venv").symlink_to(os.path.realpath(ROOT / ".venv"))
    (clone / "template" / "photo.jpg").write_text("mine")
    command = f"make -o setup fork NAME={tmp_path}/new ARGS=--defaults"
    shell(command, clone)
    assert (tmp_path / "new/train.py").exists() and not list((tmp_path / "new").rglob("photo.jpg"))
    (clone / "README.md").write_text("changed")
    with pytest.raises(AssertionError, match="commit first"):
        shell(command.replace("new", "newer"), clone)


def test_no_license_means_no_license_file(source, tmp_path):
    fork = make(source, tmp_path / "x", "blank", license="none")
    assert not (fork / "LICENSE").exists() and "License" not in (fork / "README.md").read_text()


def test_ci_runs_what_there_is_and_a_linter_of_workflows_finds_nothing(forks):
    fork = forks["blank"]
    linter = "zizmor --offline --strict-collection --no-progress --quiet"
    shell(f"{linter} --pedantic .github", fork)
    path = fork / ".github/workflows/ci.yml"
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 120 for job in workflow["jobs"].values())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = "\n".join(step.get("run", "") for step in steps)
    assert {"lint", "test", "image"} <= set(re.findall(r"make (\w+)", commands))
    for target in re.findall(r"make (\w+)", commands):
        shell(f"make --dry-run {target}", fork)
    broken = fork.parent / "broken"  # the linter is not just content with everything
    for old, new in (("contents: read", "contents: write"), ("runs-on", "run-on")):
        (broken / ".github/workflows").mkdir(parents=True, exist_ok=True)
        (broken / ".github/workflows/ci.yml").write_text(path.read_text().replace(old, new))
        with pytest.raises(AssertionError, match="exit code"):
            shell(f"{linter} .github", broken)


def test_no_ci_means_no_workflow(source, tmp_path):
    fork = make(source, tmp_path / "x", "blank", ci="none")
    assert not (fork / ".github").exists() and ".github" not in (fork / "README.md").read_text()


def test_the_images_labels_are_the_projects(source, tmp_path):
    dockerfile = (make(source, tmp_path / "my-model", "blank") / "Dockerfile").read_text()
    assert 'image.title="my-model"' in dockerfile and 'image.licenses="MIT"' in dockerfile


@pytest.mark.parametrize(
    "task", ["segmentation", pytest.param("classification", marks=pytest.mark.slow)]
)
def test_make_train_runs_on_two_ranks(task, forks):
    """The skeleton: test_your_model_in_15_minutes."""
    fork = forks[task]
    if task == "segmentation":  # of the full size it would take longer than the test
        shell(f"{sys.executable} -m data.demo.scenes datasets/demo --train 64 --val 8", fork)
    flags = "--num_steps=20 --warmup_steps=0" + " --model=tiny" * (task == "segmentation")
    output = shell(f"make -o setup train ARGS='{flags}'", fork)
    assert "2 ranks on 1 host(s)" in output and f"{task}/" in output
    assert re.search(r"step 20/20  evaluated: loss \d", output)
    assert not shell("git status --porcelain", fork), "what a run leaves behind is not ignored"


@pytest.mark.slow
def test_a_projects_tests_find_what_they_import(forks):
    """They are the same in every project, so a few are run, where least is beside them."""
    chosen = " ".join(f"tests/test_{name}.py" for name in ("config", "folders"))
    assert " passed" in shell(f"make -o setup test ARGS='-q {chosen}'", forks["blank"], 300)
    found = shell("make -o setup test ARGS='-n 0 -q --collect-only'", forks["blank"], 300)
    assert int(re.search(r"(\d+) tests collected", found)[1]) > 400


@pytest.mark.slow
def test_a_projects_own_fast_tests(forks):
    """All but those that start ranks, draw many scenes or build networks."""
    slow = ("numbers", "reduction", "equivalence", "training", "errors", "scenes", "small_runs")
    slow += ("interrupt", "sampler", "optimizer", "checkpoint", "checkpoint_damage", "run_folder")
    slow += ("virtual", "warm_start", "tasks", "readers_records", "classification", "augment")
    left_out = " ".join(f"--ignore=tests/test_{name}.py" for name in slow)
    words = "ranks or a_run_ or a_head_of"
    output = shell(
        f"make -o setup test ARGS=\"-q {left_out} -k 'not ({words})'\"",
        forks["segmentation"],
        500,
    )
    assert re.search(r"\d\d\d passed", output)


@pytest.mark.slow
def test_your_model_in_15_minutes(forks):
    """Every step of the README's page, as written; only the set-up is there already."""
    fork = forks["blank"]
    page = (fork / "README.md").read_text().split("## Your model in 15 minutes")[1]
    page = page.split("\n## ")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    outputs = []
    for block in blocks:
        words = block.replace("make setup", "true").replace("make ", "make -o setup ")
        outputs.append(shell(words, fork, 200))
    assert "step 20/20  evaluated" in outputs[0] and "2 ranks" in outputs[1]
    accuracies = re.findall(r"step 300/300  evaluated: .* accuracy ([\d.]+)", outputs[4])
    assert len(accuracies) == 2 and min(map(float, accuracies)) >= 0.96
    assert "2 passed" in outputs[5]


def test_actions_and_a_schedule_of_ones_own(forks, tmp_path):
    """The README's example, as written."""
    fork = forks["blank"]
    (code,) = re.findall(r"^```python\n(.*?)^```", (fork / "README.md").read_text(), re.M | re.S)
    (fork / "tasks" / "more.py").write_text(
        f"import tensorflow as tf\n\nfrom tasks import blank\n\n\n{code}"
    )
    flags = "--flagfile=configs/blank.cfg --task=more --num_steps=200 --lr_policy=constant"
    output = shell(f"{sys.executable} train.py {flags} --run_dir={tmp_path}", fork)
    assert len(re.findall(r"^step (?:100|200): largest weight \d", output, re.M)) == 2
    assert re.search(r"step 100/200 .* lr 0.01 ", output), output
    assert re.search(r"step 150/200 .* lr 0.005 ", output), output


def test_a_task_of_another_kind_gives_the_same_weights_on_2_and_3_ranks(
    forks, tmp_path, monkeypatch
):
    """Sequences of variable length: shares hold different numbers of valid words."""
    written = ROOT / "tests" / "sequences.py"
    assert len(written.read_text().splitlines()) < 90
    shutil.copy(written, forks["blank"] / "tasks")
    monkeypatch.setattr(ranks, "PROJECT", forks["blank"])
    flags = ["--task=sequences", "--num_classes=2", "--precision=float64", "--num_steps=12"]
    flags += ["--global_batch_size=8", "--optimizer=sgd", "--base_lr=0.2", "--log_every=1"]
    states = []
    for size in (2, 3):
        ended = ranks.launch(size, ["train.py", *flags, f"--run_dir={tmp_path / str(size)}"])
        assert ended.code == 0, ranks.last_lines(ended.output)
        states.append(tmp_path / str(size) / "checkpoints" / "step-00000012" / "state.npz")
    with np.load(states[0]) as two, np.load(states[1]) as three:
        assert two.files == three.files and len(two.files) > 20
        worst = max(np.max(np.abs(two[n] - three[n])) for n in two.files)
    assert worst < 1e-10


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, path
    path.write_text(text.replace(old, new, 1))


@pytest.fixture
def newer(source, tmp_path) -> Path:
    """The repository with a version v1.1.0 after the one that projects were made from."""
    repository = tmp_path / "repository"
    shell(f"git clone -q {source} {repository}", tmp_path)
    template = repository / "template"
    for path in (template / "engine/world.py", template / "tasks/base.py"):
        edit(path, "from __future__", "NEWER = True\nfrom __future__")
    own = ("tasks/blank.py", "configs/blank.cfg", "README.md.jinja", ".github/workflows/ci.yml")
    for name in own:
        edit(template / name, "", "# newer\n")
    edit(template / "train.py", '"""Trains a task', '"""Newer: trains a task')
    (template / "engine" / "newer.py").write_text("NEWER = True\n")
    (template / "engine" / "dropout.py").unlink()
    edit(repository / "launch/bind.sh", "\n", "\n# newer\n")
    edit(repository / "Dockerfile", "\n", "\n# newer\n")
    shell("git add -A && git commit -qm 2 && git tag v1.1.0", repository)
    return repository


def test_update_merges_what_is_ours_and_leaves_what_is_theirs(source, newer, tmp_path):
    fork = make(source, tmp_path / "fork", "blank")
    edit(fork / ".copier-answers.yml", str(source), str(newer))
    # The owner's changes: in files of their own, in the middle of the engine, in the loop.
    own = {
        "tasks/blank.py": "# mine\n", "tasks/mine.py": "# mine\n", "README.md": "# mine\n",
        "configs/blank.cfg": "# mine\n", "configs/default.cfg": "--flagfile=configs/mine.cfg\n",
        "configs/mine.cfg": "# mine\n", ".github/workflows/ci.yml": "# mine\n",
    }  # fmt: skip
    for name, text in own.items():
        (fork / name).write_text(text)
    edit(fork / "engine/world.py", "def hostname()", "# mine\ndef hostname()")
    edit(fork / "train.py", '"""Trains a task', '"""Mine: trains a task')
    (fork / "engine/mine.py").write_text("# mine\n")
    shell("git add -A && git commit -qm mine", fork)

    shell("make -o setup update", fork)
    assert "_commit: v1.1.0" in (fork / ".copier-answers.yml").read_text()
    for name, text in own.items():
        assert (fork / name).read_text() == text, name
    world = (fork / "engine/world.py").read_text()
    assert "NEWER = True" in world and "# mine\ndef hostname()" in world
    assert "NEWER = True" in (fork / "tasks/base.py").read_text()
    assert (fork / "engine/newer.py").exists() and (fork / "engine/mine.py").exists()
    assert not (fork / "engine/dropout.py").exists()
    for name in ("launch/bind.sh", "Dockerfile"):
        assert (fork / name).read_text().count("\n# newer\n") == 1
    assert os.access(fork / "launch/bind.sh", os.X_OK)
    # One line that both changed is marked, and nothing else is.
    marked = shell("grep -rl '^<<<<<<< ' . --exclude-dir=.git", fork).split()
    assert marked == ["./train.py"]
    text = (fork / "train.py").read_text()
    assert "Mine: trains" in text and "Newer: trains" in text
    assert not list(fork.rglob("*.rej"))
