"""Bad input is one clear sentence: what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

MOST = 1000  # characters of a message: what is wrong and what to do fit, a name of thousands does not


class InputError(ValueError):
    """Something the user gave is wrong; the message says what, and what to do. The command line exits with code 2.

    It is one line, whatever the names in it are.

    >>> print(InputError("cannot write a\\nb: choose another place"))
    cannot write a\\nb: choose another place
    """

    def __init__(self, message: object = "") -> None:
        text = str(message)
        if not text.isprintable():
            text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        super().__init__(text if len(text) <= MOST else f"{text[: MOST // 2]} … {text[3 - MOST // 2 :]}")


def shown(value: object) -> str:
    """A value as a message shows it: short, in one line, and whatever its own `repr` does.

    >>> shown("fast"), shown([0] * 1000)[-10:], shown(10**5000)
    ("'fast'", '… 0, 0, 0]', 'a value of type int')
    """
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:80]} … {text[-8:]}"


class LearntError(RuntimeError):
    """A batch was learnt, or a task has ended, and only then something failed: `watch`, or `autosave`.

    It is no `InputError`, which promises that nothing was changed: the same batch must not be given
    again. `__cause__` is the error itself.
    """


@contextmanager
def already(done: str) -> Iterator[None]:
    """An error inside comes after `done`, and its message says so."""
    try:
        yield
    except Exception as reason:
        raise LearntError(f"{done}, and then something failed ({first_line(reason)}): mend that, and go on with what comes next") from reason


def unknown(kind: str, name: str, valid: Iterable[str]) -> InputError:
    """The sentence for a name that does not exist, with the nearest one that does.

    >>> print(unknown("method", "agem", ["van", "a-gem"]))
    unknown method 'agem': did you mean 'a-gem'? (valid: a-gem, van)
    """
    names = sorted(valid)
    near = get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean '{near[0]}'? (valid: {', '.join(names)})" if near else f"choose one of {', '.join(names)}"
    return InputError(f"unknown {kind} '{name}': {hint}")


def is_out_of_memory(reason: BaseException | None) -> bool:
    """Whether an error, or one on the way to which it happened, says that memory is used up: a CUDA graph that was being captured then fails in
    words of its own.

    >>> is_out_of_memory(RuntimeError("CUDA error: out of memory")), is_out_of_memory(RuntimeError("no"))
    (True, False)
    """
    signs = ("not enough memory", "can't allocate memory", "ALLOC_FAILED", "out of memory")
    while reason is not None:
        if isinstance(reason, MemoryError) or any(sign in str(reason) for sign in signs):
            return True
        reason = reason.__cause__ or reason.__context__
    return False


def first_line(reason: BaseException) -> str:
    """What an error says, in one line.

    >>> first_line(ValueError("no\\nbecause")), first_line(KeyboardInterrupt())
    ('no', 'KeyboardInterrupt')
    """
    return str(reason).strip().partition("\n")[0] or type(reason).__name__
