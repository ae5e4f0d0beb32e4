"""What launchers ask of a project's settings: the flags of train.py beside this file."""

import hvdkit


class Settings(hvdkit.Settings):
    """Settings of the stand-in"""

    steps: int = hvdkit.setting(20, "steps of the run", low=0)
    mute: bool = hvdkit.setting(False, "make no step")
    deaf: bool = hvdkit.setting(False, "hear no signal")
    slow_rank: int = hvdkit.setting(-1, "the rank that takes longer to end", low=-1)
    fail: str = hvdkit.setting("", "at which step the last rank fails, and how")
