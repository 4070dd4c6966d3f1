"""Errors as one clear sentence: what is wrong and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

LONGEST = 400  # characters of a name that is shown in full: paths seldom have more
MOST = 1000  # characters of a sentence


class InputError(ValueError):
    """Bad input of the user: the message says what is wrong, and what to do.

    It is one line, whatever the names in it are. The command line exits with code 2.

    >>> print(InputError("cannot write a\\nb: choose another place"))
    cannot write a\\nb: choose another place
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(one_line(str(message)))


class LearntError(RuntimeError):
    """`watch` or `autosave` failed, after a batch was learnt or a task has ended.

    It is no `InputError`, which promises that nothing was changed: the same batch must not be given
    again. `__cause__` is the error itself.
    """


class already:  # noqa: N801 - used like a function
    """Turn an error inside into a `LearntError`: `done` says what happened before."""

    # No generator: `contextlib` would raise a StopIteration again in the place of our error.
    def __init__(self, done: str) -> None:
        self._done = done

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, reason: BaseException | None, _: object) -> None:
        if isinstance(reason, Exception):
            what = f"{self._done}, and then something failed ({first_line(reason)})"
            raise LearntError(f"{what}: mend that, and go on with what comes next") from reason


def unknown(kind: str, name: str, valid: Iterable[str]) -> InputError:
    """The sentence for a name that does not exist, with the nearest one that does.

    >>> print(unknown("method", "agem", ["van", "a-gem"]))
    unknown method 'agem': did you mean 'a-gem'? (valid: a-gem, van)
    """
    names = sorted(valid)
    near = get_close_matches(name, names, n=1, cutoff=0.4)
    hint = (
        f"did you mean '{near[0]}'? (valid: {', '.join(names)})"
        if near
        else f"choose one of {', '.join(names)}"
    )
    return InputError(f"unknown {kind} '{shortened(name, LONGEST // 2)}': {hint}")


def is_out_of_memory(reason: BaseException | None) -> bool:
    """Whether an error, or one before it in its chain, says that memory is used up.

    Out of memory, the capture of a CUDA graph fails with a message of its own.

    >>> [is_out_of_memory(RuntimeError(text)) for text in ("CUDA error: out of memory", "no")]
    [True, False]
    """
    signs = ("not enough memory", "can't allocate memory", "ALLOC_FAILED", "out of memory")
    while reason is not None:
        if isinstance(reason, MemoryError) or any(sign in str(reason) for sign in signs):
            return True
        reason = reason.__cause__ or reason.__context__
    return False


def first_line(reason: BaseException) -> str:
    """The first line of an error's message, or its type.

    >>> first_line(ValueError("no\\nbecause")), first_line(KeyboardInterrupt())
    ('no', 'KeyboardInterrupt')
    """
    return str(reason).strip().partition("\n")[0] or type(reason).__name__


def one_line(sentence: str) -> str:
    """A sentence as one line: long names in it are shortened, control characters escaped.

    >>> one_line("there is no a\\nb"), len(one_line("no " + "x" * 5000))
    ('there is no a\\\\nb', 204)
    """
    if not sentence.isprintable():
        sentence = "".join(
            c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence
        )
    if len(sentence) > LONGEST:
        sentence = re.sub(
            rf"\S{{{LONGEST + 1},}}", lambda found: shortened(found[0], LONGEST // 2), sentence
        )
    return shortened(sentence, MOST - 2)


def shortened(text: str, most: int) -> str:
    """A text of at most `most` characters: the middle of a longer one is left out.

    >>> shortened("abcdefgh", 6), shortened("abcdef", 6)
    ('abc…fgh', 'abcdef')
    """
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most // 2) :]}"


def shown(value: object) -> str:
    """A value as a sentence quotes it: short and in one line, whatever its own `repr` does.

    >>> shown("fast"), shown([0] * 1000)[-10:], shown(10**5000)
    ("'fast'", ', 0, 0, 0]', 'a value of type int')
    """
    try:
        return shortened(" ".join(repr(value).split()), 100)
    except Exception:  # a number of thousands of digits, or a repr that raises
        return f"a value of type {type(value).__name__}"
