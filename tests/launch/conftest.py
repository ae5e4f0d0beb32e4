"""The fixture `hosts`: three hosts for each file of tests."""

from hosts import hosts  # noqa: F401
