"""Groups of weights, for a task's `optimizer`: `from hvdkit.train.groups import Group`."""

from hvdkit.train.optim.groups import Group, Groups

__all__ = ["Group", "Groups"]
