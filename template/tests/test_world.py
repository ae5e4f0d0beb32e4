"""The ranks' world: what starting it changes, and how often ranks wait for each other."""

from __future__ import annotations

from ranks import launch


def test_a_rank_may_have_as_many_open_files_as_are_allowed():
    """Over Gloo it has a connection with every other one; 1,024 is what many systems begin with."""
    code = (
        "import resource, sys; sys.path.insert(0, '.'); kind = resource.RLIMIT_NOFILE;"
        "resource.setrlimit(kind, (1000, resource.getrlimit(kind)[1]));"
        "from engine import world; world.connect(); soft, most = resource.getrlimit(kind);"
        "print('raised' if soft == min(most, 65536) else soft)"
    )
    assert "raised" in launch(1, ["-c", code]).output
