"""Projects made from the template, as their owners meet them: files, runs, tests, updates."""

import os
import re
import runpy
import shutil
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from projects import ROOT, make, repository, shell, tracked

TASKS = ("segmentation", "classification", "blank")
# Files that only projects of this task have.
ONLY = {
    "segmentation": {
        "tasks/segmentation.py",
        "configs/voc.cfg",
        "configs/cityscapes.cfg",
    },
    "classification": {
        "tasks/classification.py",
        "configs/digits.cfg",
        "configs/cifar10.cfg",
        "configs/imagenet.cfg",
        "configs/fashion.cfg",
        "configs/fashion-resnet18.cfg",
    },
    "blank": set(),
}
# Files that are made for the project, besides those that are copied.
MADE = {
    ".copier-answers.yml",
    "README.md",
    "LICENSE",
    "Dockerfile",
    "configs/default.cfg",
}
MIT = 'license = "MIT"\n'
LINKS = ("launch", "docker", "examples", "requirements.txt", "requirements-dev.txt")
ENGINE = "vendor/hvdkit"
# With the demo's usual size it would take longer.
DEMO = (
    f"{sys.executable} -c 'from pathlib import Path; from hvdkit.data import scenes; "
    """scenes.ensure_demo(Path("datasets/demo"), scenes.Settings(64, 8))'"""
)
LINES = 1500  # the most of Python that is the owner's, tests included
FILES = 40  # the most that are the owner's


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    return repository(tmp_path_factory.mktemp("source") / "repository")


@pytest.fixture(scope="session")
def forks(source, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("forks")
    return {task: make(source, root / f"my-{task}", task) for task in TASKS}


def files(folder: Path) -> set[str]:
    return set(shell("git ls-files", folder).splitlines())


def owners(fork: Path) -> set[str]:
    return {
        name for name in files(fork) if name.split("/")[0] not in (*LINKS, "vendor")
    }


@pytest.mark.parametrize("task", TASKS)
def test_exactly_these_files(task, forks):
    copied = set()
    for file in tracked():
        if file.split("/")[0] in LINKS:
            copied.add(file)
        if file.startswith("hvdkit/"):
            copied.add(f"vendor/{file}")
        if file.startswith("template/") and not file.endswith(".jinja"):
            name = file.removeprefix("template/")
            if name not in (*LINKS, ENGINE):
                copied.add(name)
    others = set().union(*ONLY.values()) - ONLY[task]
    if task == "blank":
        others.add("models.py")
    assert others <= copied and not ONLY[task] - copied
    assert files(forks[task]) == (copied | MADE) - others
    assert not shell("git status --porcelain --ignored", forks[task])


@pytest.mark.parametrize("task", TASKS)
def test_a_fork_is_small_whole_and_does_not_mention_the_template(task, forks):
    fork = forks[task]
    names = owners(fork)
    assert len(names) <= FILES, sorted(names)
    python = [fork / name for name in names if name.endswith(".py")]
    assert sum(len(path.read_text().splitlines()) for path in python) <= LINES
    for name in files(fork):
        path = fork / name
        assert stat.S_ISREG(path.lstat().st_mode), name
        for origin in (ROOT / name, ROOT / "template" / name):
            if origin.exists():
                assert os.access(path, os.X_OK) == os.access(origin, os.X_OK), name
                break
        if name.endswith((".png", ".lock")):
            continue
        text = path.read_text()
        assert not re.search(r"\[%|%\]|\[\[ *_?\w+ *(\]\]|\|)|\{\{ *\w+ *\}\}", text), (
            name
        )
        if name not in (".copier-answers.yml", "README.md") and not name.startswith(
            "vendor/"
        ):
            # Kubernetes, C++ and a package of that name have templates too.
            assert not re.search(r"(?i)(?<!uri-)\btemplate\b(?!:| <)", text), name
    assert os.access(fork / "launch" / "hosts.sh", os.X_OK)
    readme = (fork / "README.md").read_text()
    assert (
        readme.startswith(f"# my-{task}\n")
        and "template" not in readme.split("## Updates")[0]
    )
    assert "Copyright (c) Ada" in (fork / "LICENSE").read_text()
    assert MIT in (fork / "pyproject.toml").read_text()
    assert (
        "Permission is hereby granted"
        in (fork / "vendor" / "hvdkit" / "LICENSE").read_text()
    )
    dockerfile = (fork / "Dockerfile").read_text()
    assert (
        f'image.title="my-{task}"' in dockerfile
        and 'image.licenses="MIT"' in dockerfile
    )


def test_folders_of_the_owners_are_kept_whatever_their_names(forks, tmp_path):
    """Runs and data sets are left out at the top only; line ends are those of Linux."""
    fork = shutil.copytree(forks["blank"], tmp_path / "fork")
    for name in ("runs/a", "datasets/a", "tasks/runs/a", "tasks/datasets/a"):
        (fork / name).parent.mkdir(parents=True)
        (fork / name).write_bytes(b"a\r\n")
    shell("git add --all && git commit -qm mine", fork)
    assert files(fork) - files(forks["blank"]) == {"tasks/datasets/a", "tasks/runs/a"}
    (fork / "train.py").unlink()
    shell("git -c core.autocrlf=true checkout -q train.py", fork)
    assert b"\r" not in (fork / "train.py").read_bytes()


@pytest.mark.parametrize("task", TASKS)
def test_lint(task, forks):
    shell("make -o setup lint", forks[task])


@pytest.mark.parametrize("task", TASKS)
def test_everything_that_is_linked_or_named_is_there(task, forks):
    fork = forks[task]
    for page in fork.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"
    of_readers = ("configs/tumours.cfg", "configs/pets.cfg", "configs/mine.cfg")
    pages = [
        path
        for path in fork.rglob("*")
        if path.suffix in (".md", ".sh", ".yaml", ".cfg")
    ]
    for page in pages:
        for flagfile in re.findall(r"flagfile=(configs/\w+\.cfg)", page.read_text()):
            assert (fork / flagfile).exists() or flagfile in of_readers, page
    dockerfile = (fork / "Dockerfile").read_text()
    # test_image.py checks what it copies from there.
    places = dict(re.findall(r"^ARG (PROJECT|ENGINE)=(.*)$", dockerfile, re.MULTILINE))
    assert places == {"PROJECT": ".", "ENGINE": ENGINE}


# Finds files in messages, docstrings and pages.
NAMED = r"(?<![\w/.])((?:examples|docs|benchmarks|hvdkit|launch|docker)/[\w/.-]*\w)(?![\w*/{}-])"
ELSEWHERE = ("of the engine's repository", "` of the engine's repository")


def test_what_messages_and_docstrings_name_is_there(forks):
    fork = forks["blank"]
    texts = [
        fork / name
        for name in files(fork)
        if name.endswith((".py", ".sh", ".md", ".yaml"))
    ]
    missing = []
    for path in texts:
        text = path.read_text()
        for match in re.finditer(NAMED, text):
            name = match[1]
            places = [fork / name, fork / ENGINE / "src" / name, path.parent / name]
            following = re.sub(r'[\s"]+', " ", text[match.end() :][:100]).strip()
            is_elsewhere = following.startswith(ELSEWHERE)
            if not is_elsewhere and not any(place.exists() for place in places):
                missing.append(f"{path.relative_to(fork)}: {name}")
    assert not missing, missing


def test_the_repository_trains_by_default_what_a_fork_does(forks):
    default = "configs/default.cfg"
    here = (ROOT / "template" / default).read_text()
    assert here == (forks["segmentation"] / default).read_text()
    assert here != (forks["blank"] / default).read_text()


def test_names_that_make_no_project_are_refused(source, tmp_path):
    with pytest.raises(ValueError, match="a letter, then"):
        make(source, tmp_path / "x", "blank", project_name="my model")


def test_make_fork_takes_what_is_committed(tmp_path):
    """Pictures that a user left in the folder stay there; a changed file would be forgotten."""
    clone = repository(tmp_path / "clone")
    (clone / ".venv").symlink_to(os.path.realpath(ROOT / ".venv"))
    (clone / "template" / "photo.jpg").write_text("mine")
    (clone / "launch" / "own.sh").write_text("mine")
    command = f"make -o setup fork NAME={tmp_path}/new ARGS=--defaults"
    said = shell(command, clone)
    note = "note: not committed, so not in the project: "
    assert f"{note}launch/own.sh, template/photo.jpg\n" in said
    assert not (tmp_path / "new/launch/own.sh").exists()
    assert (tmp_path / "new/train.py").exists() and not list(
        (tmp_path / "new").rglob("photo.jpg")
    )
    before = everything(tmp_path)
    refused = {
        f"{tmp_path}/my fork": "'my fork', is the project's name: use a letter",
        f"{tmp_path}/new": "new has files already, as .copier-answers.yml: name a folder",
        "my-model": "clone/my-model lies in the template's own clone: name a folder outside",
        "~nobody-here/x": "NAME=~nobody-here/x: there is no such user",
        f"{tmp_path}/new/train.py/x": "cannot be used: Not a directory",
    }
    for name, message in refused.items():
        with pytest.raises(AssertionError, match=message):
            shell(f"make -o setup fork NAME='{name}' ARGS=--defaults", clone)
    assert everything(tmp_path) == before and set(os.listdir(tmp_path)) == {
        "clone",
        "new",
    }
    # An update takes the newest commit too, although the last tag is older than the project.
    shell("git init -q && git add -A && git commit -qm mine", tmp_path / "new")
    shell("git tag 2023 && git commit -q --allow-empty -m newer", clone)
    (clone / "launch/stray.sh").write_text("mine")
    shell("make -o setup update", tmp_path / "new")
    updated = yaml.safe_load((tmp_path / "new/.copier-answers.yml").read_text())
    assert updated["_commit"].startswith("2023-1-g")
    assert not (tmp_path / "new/launch/stray.sh").exists()

    (clone / "README.md").write_text("changed")
    with pytest.raises(AssertionError, match="commit first"):
        shell(command.replace("new", "newer"), clone)
    shell("git checkout -q README.md", clone)
    shell(f"HOME={tmp_path} make -o setup fork NAME='~/home' ARGS=--defaults", clone)
    assert (tmp_path / "home/train.py").exists() and not (clone / "~").exists()


def test_no_license_and_no_ci_mean_no_such_file(source, tmp_path):
    fork = make(source, tmp_path / "x", "blank", license="none", ci="none")
    readme = (fork / "README.md").read_text()
    assert not (fork / "LICENSE").exists() and "License" not in readme
    project = (fork / "pyproject.toml").read_text()
    assert project == (ROOT / "template" / "pyproject.toml").read_text().replace(
        MIT, ""
    )
    assert not (fork / ".github").exists() and ".github" not in readme


def test_ci_runs_what_there_is_and_a_linter_of_workflows_finds_nothing(forks):
    fork = forks["blank"]

    def lint(place: object) -> None:
        shell(
            "zizmor --offline --strict-collection --no-progress --quiet --pedantic "
            + str(place),
            fork,
        )

    lint(".github")
    path = fork / ".github/workflows/ci.yml"
    broken = fork.parent / "broken.yml"
    broken.write_text(path.read_text().replace("contents: read", "contents: write"))
    with pytest.raises(AssertionError, match="exit code"):
        lint(broken)
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    commands = ""
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 120
        for step in job["steps"]:
            commands += step.get("run", "") + "\n"
    assert {"lint", "test", "image"} <= set(re.findall(r"make (\w+)", commands))
    for target in re.findall(r"make (\w+)", commands):
        shell(f"make --dry-run {target}", fork)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_projects_own_tests(task, forks):
    if task == "segmentation":
        shell(DEMO, forks[task])
    assert "2 passed" in shell("make -o setup test ARGS='-q -n 0'", forks[task], 500)


def steps(fork: Path, replaced: dict[str, str] | None = None) -> list[str]:
    """The output of each block of the README's page, with words replaced; it is set up already."""
    page = (fork / "README.md").read_text().split("## Your model in 15 minutes")[1]
    page = page.split("\n## ")[0]
    outputs = []
    for block in re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        words = block.replace("make setup", "true").replace("make ", "make -o setup ")
        for old, new in (replaced or {}).items():
            words = words.replace(old, new)
        outputs.append(shell(f"PATH={ROOT}/.venv/bin:$PATH; {words}", fork, 600))
    return outputs


@pytest.mark.slow
def test_your_model_in_15_minutes(forks):
    outputs = steps(forks["blank"])
    assert len(outputs) == 6
    assert "step 20/20  evaluated" in outputs[0] and "2 ranks" in outputs[1]
    accuracies = re.findall(
        r"step 300/300  evaluated: .* accuracy ([\d.]+)", outputs[4]
    )
    assert len(accuracies) == 2
    assert all(float(accuracy) >= 0.96 for accuracy in accuracies)
    assert "2 passed" in outputs[5]


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS[:2])
def test_own_pictures_in_15_minutes(task, forks, tmp_path):
    draws = np.random.default_rng(5)
    masks = task == "segmentation"
    pets = tmp_path / "pets"
    for number in range(40):
        image = draws.integers(0, 120, (48, 48, 3), np.uint8)
        label = np.zeros((48, 48), np.uint8)
        square = np.s_[8:28, number % 25 : number % 25 + 20]
        image[square][..., number % 2] = 230
        label[square] = 1
        colour = "green" if number % 2 else "red"
        photo = pets / ("images" if masks else colour) / f"{number}.png"
        photo.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(photo)
        if masks:
            (pets / "masks").mkdir(exist_ok=True)
            Image.fromarray(label).save(pets / "masks" / f"{number}.png")
    replaced = {"~/pets": f"--yes {pets}", "photo.jpg": str(photo)}
    _, started, trained, used = steps(forks[task], replaced)
    assert (
        f"{task}: 32 pictures to train on" in started and "dry run: it works" in trained
    )
    scores = re.findall(r"evaluated: .* (?:accuracy|miou) ([\d.]+)", trained)
    assert float(scores[-1]) > 0.9, scores
    assert "equal outputs" in used and "tf.Tensor" in used


def test_actions_and_a_schedule_of_ones_own(forks):
    """The example of docs/change-it.md, as written."""
    fork = forks["blank"]
    page = (ROOT / "docs" / "change-it.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    imports = "import tensorflow as tf\n\nfrom tasks import blank\n\n\n"
    (fork / "tasks" / "more.py").write_text(imports + code)
    output = shell(
        f"{sys.executable} train.py --flagfile=configs/blank.cfg --task=more --num_steps=200",
        fork,
    )
    assert len(re.findall(r"^step (?:100|200): largest weight \d", output, re.M)) == 2
    assert re.search(r"step 100/200 .* lr 0.01 ", output), output
    assert re.search(r"step 150/200 .* lr 0.005 ", output), output
    # git ignores the files that a run leaves.
    assert shell("git status --porcelain", fork).split() == ["??", "tasks/more.py"]


def test_a_script_with_fit_becomes_a_task(forks):
    """The code of docs/from-keras-fit.md, as written, for an epoch; its action and its notebook."""
    fork = forks["blank"]
    page = (ROOT / "docs" / "from-keras-fit.md").read_text()
    _, task, action, notebook = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    method = "\n    def actions(self, run):\n        return [EachEpoch(run)]\n"
    (fork / "tasks/scanned.py").write_text(task + method + "\n\n" + action)
    (fork / "notebook.py").write_text(notebook.replace("5epochs", "2epochs"))
    (write,) = re.findall(r"^cat > configs/scanned.cfg .*?^EOF\n", page, re.M | re.S)
    shell(write, fork)
    output = shell(f"{sys.executable} notebook.py", fork)
    assert re.search(r"^epoch 2: loss \d", output, re.M), output
    assert float(re.findall(r"accuracy ([\d.]+)", output)[-1]) > 0.6, output
    for name in ("tasks/scanned.py", "configs/scanned.cfg", "notebook.py"):
        (fork / name).unlink()


TASK_OF_STEPS = """
import keras
import tensorflow as tf

from tasks import blank


class Task(blank.Task):
    def __init__(self, config):
        super().__init__(config)
        draws = tf.random.stateless_normal([64, 3], [1, 2])
        self.queue = tf.Variable(draws, trainable=False, name="queue")

    def build_model(self):
        model = super().build_model()
        self.teacher = keras.models.clone_model(model)
        self.teacher.trainable = False
        return model

    def compare(self, outputs, keys):
        others = outputs @ tf.transpose(self.queue)
        each = tf.reduce_logsumexp(others, -1) - tf.reduce_sum(outputs * keys, -1)
        return each, tf.ones_like(each)


class TwoTerms(blank.Task):
    def loss(self, outputs, targets):
        each, weights = super().loss(outputs, targets)
        size = tf.reduce_mean(tf.square(outputs), -1)
        return {"first": (each, weights), "second": (size, weights)}
"""
RUN_OF_STEPS = """
import sys

import hvdkit
import {module}
from settings import Settings

settings = hvdkit.load_settings(
    Settings,
    flagfile="configs/blank.cfg",
    task="{task}",
    num_steps=2,
    eval_every=0,
    run_dir="runs/{module}",
)
sys.exit(hvdkit.main({module}.train, settings))
"""


@pytest.mark.slow
def test_other_steps_train_as_their_page_has_them(forks):
    """The code of docs/your-own-step.md, as written, for two steps each."""
    fork = forks["blank"]
    page = (ROOT / "docs" / "your-own-step.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    names = ("looks", "teacher", "sharpness", "two_terms", "penalty")
    template = (fork / "train.py").read_text()
    head, _, rest = template.partition("def make_step")
    _, _, tail = rest.partition("def train(")
    head += "from hvdkit.train import across\n\n\n"
    (fork / "tasks/steps.py").write_text(TASK_OF_STEPS)
    two_terms = (
        "from tasks.steps import TwoTerms\n\n\nclass Task(TwoTerms):\n    pass\n"
    )
    (fork / "tasks/terms.py").write_text(two_terms)
    for name, block in zip(names, blocks, strict=True):
        if not block.startswith("def make_step"):
            body = textwrap.indent(f"{block}\nreturn step\n", "    ")
            block = f"def make_step(run: hvdkit.Run):\n{body}"
        code = f"{head}{block}\n\ndef train({tail}"
        (fork / f"train_{name}.py").write_text(code)
        task = "terms" if name == "two_terms" else "steps"
        run = RUN_OF_STEPS.format(module=f"train_{name}", task=task)
        (fork / "run_steps.py").write_text(run)
        output = shell(f"{sys.executable} run_steps.py", fork)
        assert "step 2/2  evaluated" in output, output
        (fork / f"train_{name}.py").unlink()
    for file in ("tasks/steps.py", "tasks/terms.py", "run_steps.py"):
        (fork / file).unlink()


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, path
    path.write_text(text.replace(old, new, 1))


def test_make_elsewhere_says_what_to_type(forks, tmp_path):
    makefile = forks["blank"] / "Makefile"
    with pytest.raises(
        AssertionError, match=rf"type `make -C {makefile.parent}/ lint`, which runs"
    ):
        shell(f"make -f {makefile} lint", tmp_path)


# An update replaces these at the top of a project. All else is the owner's.
REPLACED = {
    ".copier-answers.yml",
    "Dockerfile",
    "pyproject.toml",
    "uv.lock",
    "vendor",
    *LINKS,
}
REWRITTEN = (
    "launch/stop.sh",
    "launch/README.md",
    "examples/gan/train.py",
    "Dockerfile",
)
# Added by the newer version: the first three at places that are the owner's.
ADDED = ("notebook.py", "tests/test_more.py", "tasks/more.py", "launch/more.sh")


@pytest.fixture(scope="session")
def newer(source, tmp_path_factory) -> Path:
    """The repository with a version v1.1.0, and v0.9.0, whose updates brought back what was
    gone."""
    repository = tmp_path_factory.mktemp("newer") / "repository"
    shell(f"git clone -q {source} {repository}", source)
    engine = repository / "hvdkit/src/hvdkit"
    template = repository / "template"
    copied = repository / "copier.yml"
    rules = copied.read_text()
    older = yaml.safe_load(rules)
    assert "'update'" in older["_exclude"].pop(0)
    older["_skip_if_exists"] = [
        ".dockerignore",
        ".github/*",
        "README.md",
        "configs/*",
        "train.py",
        "models.py",
        "settings.py",
        "tasks/*",
        "tests/*",
        "Makefile",
    ]
    copied.write_text(yaml.safe_dump(older, sort_keys=False))
    shell("git commit -qam 'An older version' && git tag v0.9.0", repository)
    copied.write_text(rules)
    edit(engine / "ranks/world.py", "import os", "NEWER = True\nimport os")
    (engine / "newer.py").write_text("NEWER = True\n")
    (engine / "testing.py").unlink()
    owned = (
        "train.py",
        "settings.py",
        "models.py",
        "tasks/blank.py",
        "configs/blank.cfg",
    )
    for name in (*owned, "Makefile", "README.md.jinja"):
        edit(template / name, "", "# changed by us\n")
    for name in REWRITTEN:
        edit(repository / name, "\n", "\n# changed by us\n")
    edit(template / "pyproject.toml", "line-length = 88", "line-length = 110")
    for name in ADDED:
        place = repository if name.startswith("launch/") else template
        (place / name).write_text("# changed by us\n")
    shell("git add -A && git commit -qm 2 && git tag v1.1.0", repository)
    return repository


def contents(fork: Path) -> dict[str, str]:
    """The owner's files, as they are now, those that git does not know included."""
    kept = {}
    for path in fork.rglob("*"):
        name = str(path.relative_to(fork))
        if path.is_file() and name.split("/")[0] not in (REPLACED | {".git", ".venv"}):
            kept[name] = path.read_text()
    return kept


def project(newer: Path, whole: Path, folder: str, version: str) -> Path:
    """A project of a version, as a folder of a larger repository."""
    fork = make(newer, whole / folder, "segmentation", version=version)
    shell(
        f"rm -rf ./{folder}/.git && git init -q && git add -A && git commit -qm mine",
        whole,
    )
    return fork


@pytest.mark.parametrize(("renamed", "version"), [(False, "v0.9.0"), (True, "v1.0.0")])
def test_update_leaves_out_what_the_owner_deleted_or_renamed(
    renamed, version, newer, tmp_path
):
    """Each file that is the owner's; `copier recopy` brings the missing ones back."""
    fork = project(newer, tmp_path, "models/fork", version)
    owned = contents(fork)
    assert {
        "models.py",
        "tasks/segmentation.py",
        "configs/demo.cfg",
        ".dockerignore",
    } <= set(owned)
    for name, text in owned.items():
        (fork / name).unlink()
        if renamed:
            mine = fork / "mine" / name
            mine.parent.mkdir(parents=True, exist_ok=True)
            mine.write_text(text)
    gone = ("Dockerfile", "launch/jobset.yaml")
    for name in gone:
        (fork / name).unlink()
    shell("git add -A && git commit -qm mine && git clean -fdq", tmp_path)
    before = contents(fork)
    entries = set(os.listdir(fork))
    shell("copier update --trust --quiet --defaults", fork)
    assert "_commit: v1.1.0" in (fork / ".copier-answers.yml").read_text()
    assert contents(fork) == before and set(os.listdir(fork)) == entries
    assert (fork / ADDED[-1]).exists() and not any(
        (fork / name).exists() for name in gone
    )

    (fork / "train.py").write_text("# mine\n")
    shell("copier recopy --quiet --defaults --overwrite", fork)
    assert set(owned) | set(ADDED[:3]) <= set(contents(fork))
    assert (fork / "train.py").read_text() == "# mine\n"


@pytest.mark.parametrize(
    ("folder", "version"), [("", "v1.0.0"), ("models/fork", "v0.9.0")]
)
def test_update_replaces_the_engine_and_leaves_what_is_theirs(
    folder, version, newer, tmp_path
):
    fork = project(newer, tmp_path / "whole", folder, version)
    for name in [*contents(fork), "launch/stop.sh"]:
        (fork / name).write_text(f"# mine\n{(fork / name).read_text()}")
    # The newer version has a file of that name, and another line length.
    (fork / "notebook.py").write_text("# mine\n")
    edit(fork / "pyproject.toml", "line-length = 88", "line-length = 79")
    edit(
        fork / ENGINE / "src/hvdkit/ranks/world.py", "import os", "MINE = 1\nimport os"
    )
    shell("git add -A && git commit -qm mine", fork)
    before = contents(fork)
    message = (
        rf"(?s)your changes in it too: {ENGINE}/src/hvdkit/ranks/world\.py\n"
        r".*settle the conflict in pyproject\.toml"
    )
    with pytest.raises(AssertionError, match=message):
        shell("make -o setup update", fork)
    assert "_commit: v1.1.0" in (fork / ".copier-answers.yml").read_text()
    assert contents(fork) == before
    engine = fork / ENGINE / "src/hvdkit"
    world = (engine / "ranks/world.py").read_text()
    assert "NEWER = True" in world and "MINE" not in world
    assert (engine / "newer.py").exists() and not (engine / "testing.py").exists()
    for name in REWRITTEN:
        text = (fork / name).read_text()
        assert text.count("# changed by us\n") == 1 and "<<<<" not in text, name
    assert os.access(fork / "launch/stop.sh", os.X_OK) and (fork / ADDED[-1]).exists()
    found = shell("grep -rlE '^(<<<<<<<|>>>>>>>) ' . --exclude-dir=.git || true", fork)
    assert found.split() == ["./pyproject.toml"] and not list(fork.rglob("*.rej"))


def test_lists_of_what_an_update_is_about_agree():
    rules = yaml.safe_load((ROOT / "copier.yml").read_text())
    rendered = re.findall(r"^!/(.*)$", rules["_exclude"][0], re.M)
    kept = [rule.removeprefix("!") for rule in rules["_skip_if_exists"][1:]]
    assert (
        set(rendered[1:]) == set(kept[1:]) and "answers_file" in rendered[0] + kept[0]
    )
    checked = runpy.run_path(str(ROOT / "before_update.py"))
    merged = {name.removesuffix(".jinja") for name in checked["MERGED"]}
    names = {folder.split("/")[0] for folder in checked["FOLDERS"].values()} | merged
    assert names | {".copier-answers.yml"} == REPLACED
    locked = {name for name in names if name.startswith("requirements")}
    assert set(kept[1:]) == (names - locked) | {"requirements*.txt"}
    rule = runpy.run_path(str(ROOT / "fork.py"))["NAME"].pattern
    in_jinja = rule.replace("\\", "\\\\")
    assert f"'{in_jinja}'" in rules["project_name"]["validator"]
    assert re.search(rule, "model") and not re.search(rule, "model\n")


def test_a_project_is_made_from_a_clone_alone(tmp_path):
    shutil.copy(ROOT / "fork.py", tmp_path)
    words = [sys.executable, tmp_path / "fork.py", tmp_path / "model"]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1, ended.stderr
    assert "error: a project is made from a clone" in ended.stderr
    assert not (tmp_path / "model").exists()


def everything(folder: Path) -> dict[str, bytes]:
    files = (
        path
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.parts
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_update_says_what_it_cannot_find_and_refuses_links(newer, tmp_path):
    """The answers file renamed, the repository moved, launch/ a link and then renamed."""
    fork = project(newer, tmp_path, "models/fork", "v1.0.0")
    answers = fork / ".copier-answers.yml"
    original = answers.read_text()
    answers.rename(fork / "answers.yml")
    with pytest.raises(
        AssertionError, match=rf"\n?error: .* {answers} is missing, [^\n]*\nmake"
    ):
        shell("make -o setup update", fork)
    answers.write_text(original.replace(str(newer), f"{tmp_path}/gone"))
    gone = rf"error: .* git cannot read {tmp_path}/gone, [^\n]* in {answers} and commit\nmake"
    with pytest.raises(AssertionError, match=gone):
        shell("make -o setup update", fork)
    (fork / "answers.yml").rename(answers)

    (fork / "launch").rename(tmp_path / "shared")
    (fork / "launch").symlink_to("../../shared")
    shell("git add -A && git commit -qm mine", fork)
    before = everything(tmp_path)
    with pytest.raises(
        AssertionError, match="write through links, as here launch: put the files"
    ):
        shell("make -o setup update", fork)
    assert everything(tmp_path) == before

    (fork / "launch").unlink()
    (tmp_path / "shared").rename(fork / "start")
    shell("git add -A && git commit -qm mine", tmp_path)
    before = everything(fork / "start")
    output = shell("make -o setup update", fork)
    assert (
        "note: launch/: not here, so not updated, nor under another name; only"
        in output
    )
    assert everything(fork / "start") == before
    assert os.listdir(fork / "launch") == ["more.sh"]
    assert "_commit: v1.1.0" in answers.read_text()


def test_update_refuses_first_what_would_lose_files_of_the_owners(newer, tmp_path):
    """Files that git ignores, the owner's at a path that the newer version adds, and both."""
    fork = project(newer, tmp_path, "models/fork", "v1.0.0")
    owned = ADDED[-1]
    ignored = tmp_path / ".gitignore"
    ignored.write_text("vendor/\n*.lock\nmore.sh\n")
    (fork / owned).write_text("# mine\n")
    shell("git rm -rq --cached . && git add -A && git commit -qm mine", tmp_path)
    before = everything(fork)
    with pytest.raises(AssertionError, match="--trust"):
        shell("copier update --defaults", fork)
    message = (
        r"(?s)does not track uv\.lock, vendor/hvdkit/.* \d+ more .*\.gitignore line [12]: "
        rf".*overwrite yours: {owned}"
    )
    with pytest.raises(AssertionError, match=message):
        shell("copier update --trust --defaults", fork)
    assert everything(fork) == before
    # The way out for the first kind; the owner's file is tracked from here on.
    ignored.unlink()
    shell("git add -A && git commit -qm mine", tmp_path)
    with pytest.raises(
        AssertionError, match=f"nothing is updated, .* overwrite yours: {owned}"
    ):
        shell("make -o setup update", fork)
    assert everything(fork) == before
    (fork / owned).rename(fork / "launch/mine.sh")
    shell("git add -A && git commit -qm mine", tmp_path)
    shell("make -o setup update", fork)
    assert (fork / owned).read_text() == "# changed by us\n"
    assert (fork / "launch/mine.sh").read_text() == "# mine\n"
    assert "NEWER = True" in (fork / ENGINE / "src/hvdkit/ranks/world.py").read_text()
