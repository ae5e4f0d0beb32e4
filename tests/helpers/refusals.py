"""What every test asks of an error that a user sees: one line that says what is wrong."""

from collections.abc import Callable

from hvdkit.stop import Stop


def refused(call: Callable, *words: object, kind: type[Exception] = ValueError) -> Exception:
    """`call` must raise such an error, of one line with these words in it; returned."""
    try:
        call()
    except kind as error:
        assert "\n" not in str(error) and all(str(w) in str(error) for w in words), str(error)
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def differ(call: Callable, *words: object) -> Exception:
    """As `refused`, by a Stop: what ranks find out together."""
    return refused(call, *words, kind=Stop)
