"""A value that holds inside a `with` block, as one that readers look up."""

import contextlib
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Scoped(Generic[T]):
    """`value`, and inside a block of `set` another one."""

    def __init__(self, value: T) -> None:
        self.value = value

    @contextlib.contextmanager
    def set(self, value: T) -> Iterator[None]:
        before = self.value
        self.value = value
        try:
            yield
        finally:
            self.value = before
