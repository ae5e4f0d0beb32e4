"""Checks of an error that a user sees: it is one line that says what is wrong."""

from collections.abc import Callable

from hvdkit.stop import Stop


def refused(
    call: Callable, *words: object, kind: type[Exception] = ValueError
) -> Exception:
    """`call` must raise such an error, of one line with these words in it; returns the error."""
    try:
        call()
    except kind as error:
        message = str(error)
        assert "\n" not in message, message
        assert all(str(word) in message for word in words), message
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def differ(call: Callable, *words: object) -> Exception:
    """As `refused`, by the Stop that ranks raise together."""
    return refused(call, *words, kind=Stop)
