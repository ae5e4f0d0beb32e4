"""The demo's data set, for a task: `from hvdkit.data import scenes`."""

from hvdkit.data.prepare.scenes import Scene, Settings, ensure_demo, scene

__all__ = ["Scene", "Settings", "ensure_demo", "scene"]
