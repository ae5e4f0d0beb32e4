"""The demo's layout with little data, for runs of a few steps; a folder of checkpoints."""

import signal
from pathlib import Path

import pytest
from hosts import hosts  # noqa: F401, three hosts for each file of tests

from hvdkit.settings import project
from ranks import PROJECT, TINY_FLAGS

project.use(PROJECT)
# A shell starts what is in its background deaf to Ctrl-C, and programs under test would inherit it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from hvdkit.data.prepare import scenes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Launchers' tests, which mostly wait, come beside the longest file, which fills a core.

    The second longest comes first: at the end, one of two processes would do it alone.
    """
    folder = Path(__file__).parent / "launch"
    waiting = [item for item in items if item.path.parent == folder]
    others = [item for item in items if item.path.parent != folder]
    others.sort(key=lambda item: item.path.name != "test_virtual.py")
    longest = [
        n for n, item in enumerate(others) if item.path.name == "test_small_runs.py"
    ]
    at = longest[-1] + 1 if longest else len(others)
    items[:] = others[:at] + waiting + others[at:]


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """26 training and 10 validation scenes of 32 pixels; 10 is no multiple of 3 batches of 4."""
    root = tmp_path_factory.mktemp("tiny") / "data"
    scenes.ensure_demo(
        root, scenes.Settings(train=26, val=10, size=32, box=(12, 16), digits=(1, 3))
    )
    return root


@pytest.fixture
def tiny(tiny_data: Path, tmp_path: Path) -> list[str]:
    """Flags of a tiny run with a run folder of its own."""
    return [*TINY_FLAGS, f"--data_dir={tiny_data}", f"--run_dir={tmp_path / 'run'}"]


@pytest.fixture
def kept(tmp_path: Path):
    """`Checkpoints` that keep the two newest ones of a run on one rank."""
    # TensorFlow takes seconds, and prints lines where hvdkit.ranks.quiet does not come first.
    from small_checkpoints import ALONE

    from hvdkit.checkpoint.checkpoints import Checkpoints

    return Checkpoints(tmp_path / "checkpoints", keep=2, world=ALONE)
