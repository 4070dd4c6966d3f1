"""Reading the pickles of CIFAR-100 without running them, in memory and time that the caller bounds.

A pickle is a program, and Python's own reader runs it: a few hundred bytes can ask for gigabytes.
This reader knows only the operations for numbers, text, lists, dictionaries and arrays of bytes,
from Python 2 to today. Calls are written down and never made.
"""

from __future__ import annotations

import codecs
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

NAMES = (  # by what numpy pickles an array of bytes, from Python 2 to today, with any protocol
    "numpy.core.multiarray._reconstruct",
    "numpy.core.numeric._frombuffer",
    "numpy.ndarray",
    "numpy.dtype",
    "_codecs.encode",
)
SHORT = 1000  # bytes: longer text stays where it is in the file
LINE = 300  # bytes of a number or a name that is written as text
PIECE = 2**18  # bytes that are decoded at once
DIMENSIONS, LARGEST = 4, 2**40  # of an array
SMALL_NUMBERS = re.compile(rb"(?:K.){1,1000}", re.DOTALL)  # most of a list of labels


class ForeignNameError(ValueError):
    """A pickle asks for something that is no part of an array. The message is its name."""


@dataclass(eq=False)
class Named:
    """What a pickle says about an object: the name it is made by, its arguments and its state."""

    name: str
    arguments: tuple[Any, ...] | None = None
    state: Any = None


@dataclass(eq=False)
class Text:
    """Text that is not decoded yet: it is long, or may take four bytes per character."""

    raw: memoryview
    encoding: str

    def latin1(self) -> bytearray:
        decoder, made = codecs.getincrementaldecoder(self.encoding)(), bytearray()
        # In pieces: one wide character makes all others of its text as wide.
        for start in range(0, len(self.raw), PIECE):
            made += decoder.decode(self.raw[start : start + PIECE]).encode("latin1")
        made += decoder.decode(b"", final=True).encode("latin1")
        return made


def load(content: bytes, most: int) -> Any:
    """The value of a pickle of at most `most` operations. A `ValueError` says why it is refused."""
    try:
        return _Reader(content).run(most)
    except (IndexError, struct.error):  # also of a length that points behind the end
        raise ValueError("it ends too early") from None


def array_of_bytes(made: Any) -> NDArray[np.uint8] | None:
    """The array that a value of a pickle describes; None if that is not an array of bytes."""
    match made:
        case Named(
            name="_reconstruct",
            state=(_, shape, Named(name="dtype", arguments=("u1" | b"u1", *_)), columns_first, raw),
        ):
            order: Literal["C", "F"] = "F" if columns_first is True or columns_first == 1 else "C"
        case Named(
            name="_frombuffer",
            arguments=(raw, Named(name="dtype", arguments=("u1", *_)), shape, "C" | "F" as order),
        ):
            pass
        case _:
            return None
    match raw:
        case Named(name="encode", arguments=(str() | Text() as text, "latin1")):
            raw = text.encode("latin1") if isinstance(text, str) else text.latin1()
    if not isinstance(raw, bytes | bytearray | memoryview) or not isinstance(shape, tuple):
        return None
    possible = all(type(n) is int and 0 < n < LARGEST for n in shape)
    if not possible or len(shape) > DIMENSIONS or math.prod(shape) != len(raw):
        return None
    return np.frombuffer(raw, np.uint8).reshape(shape, order=order)


class _Reader:
    """A stack, a memo and a file. A length that points behind its end fails the next operation."""

    def __init__(self, content: bytes) -> None:
        self.content, self.view = content, memoryview(content)
        self.stack: list[Any] = []
        self.marks: list[int] = []  # heights of the stack
        self.memo: dict[int, Any] = {}

    def run(self, most: int) -> Any:
        content, stack, memo, at = self.content, self.stack, self.memo, 0
        while most > 0:
            most -= 1
            code = content[at]
            at += 1
            if code == 0x55:  # SHORT_BINSTRING; these few are nearly all of a file
                end = at + 1 + content[at]
                stack.append(content[at + 1 : end])
                at = end
            elif code == 0x72:  # LONG_BINPUT
                memo[int.from_bytes(content[at : at + 4], "little")] = stack[-1]
                at += 4
            elif code == 0x4B:  # BININT1
                numbers = SMALL_NUMBERS.match(content, at - 1)
                if numbers is None:
                    raise IndexError
                stack.extend(content[at : numbers.end() : 2])
                most -= (numbers.end() - at) // 2
                at = numbers.end()
            elif code == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif code == 0x8C:  # SHORT_BINUNICODE
                end = at + 1 + content[at]
                raw = content[at + 1 : end]
                if raw.isascii():
                    stack.append(raw.decode("ascii"))
                else:
                    stack.append(Text(self.view[at + 1 : end], "utf-8"))
                at = end
            elif code == 0x2E:  # STOP
                return stack.pop()
            elif code in OPERATIONS:
                at = OPERATIONS[code](self, at)
            else:
                raise ValueError(
                    f"it has the operation {code:#04x} at byte {at - 1}, which CIFAR-100 has not"
                )
        raise ValueError("it has more operations than CIFAR-100")

    # ---- what is written in the file: each of these returns the place behind it

    def number(self, at: int) -> int:
        line, at = self._line(at)
        self.stack.append(line == b"01" if line in (b"00", b"01") else int(line.removesuffix(b"L")))
        return at

    def real(self, at: int) -> int:
        line, at = self._line(at)
        self.stack.append(float(line))
        return at

    def packed(self, at: int, form: str) -> int:
        self.stack += struct.unpack_from(form, self.content, at)
        return at + struct.calcsize(form)

    def long(self, at: int) -> int:
        end = at + 1 + self.content[at]
        self.stack.append(int.from_bytes(self.content[at + 1 : end], "little", signed=True))
        return end

    def text(self, at: int, form: str, encoding: str | None) -> int:
        (length,) = struct.unpack_from(form, self.content, at)
        start = at + struct.calcsize(form)
        return self._push_text(start, start + int(length), encoding)

    def line_of_text(self, at: int) -> int:
        end = self._end_of_line(at, len(self.content))
        return self._push_text(at, end, "raw-unicode-escape") + 1

    def _push_text(self, at: int, end: int, encoding: str | None) -> int:
        if end - at > SHORT:
            self.stack.append(Text(self.view[at:end], encoding) if encoding else self.view[at:end])
            return end
        raw = self.content[at:end]
        if encoding is None:
            self.stack.append(raw)
        elif raw.isascii() and b"\\" not in raw:
            self.stack.append(str(raw, "ascii"))
        else:
            self.stack.append(Text(self.view[at:end], encoding))
        return end

    def _line(self, at: int) -> tuple[bytes, int]:
        end = self._end_of_line(at, at + LINE)
        return self.content[at:end], end + 1

    def _end_of_line(self, at: int, last: int) -> int:
        end = self.content.find(b"\n", at, last)
        if end < 0:
            raise ValueError(f"it has no end of line behind byte {at}")
        return end

    # ---- the memo

    def put(self, at: int, form: str | None = None) -> int:
        index, at = self._index(at, form)
        self.memo[index] = self.stack[-1]
        return at

    def get(self, at: int, form: str | None = None) -> int:
        index, at = self._index(at, form)
        if index not in self.memo:
            raise ValueError("it refers to what it does not have")
        self.stack.append(self.memo[index])
        return at

    def _index(self, at: int, form: str | None) -> tuple[int, int]:
        if form is None:
            line, at = self._line(at)
            return int(line), at
        (index,) = struct.unpack_from(form, self.content, at)
        return index, at + struct.calcsize(form)

    # ---- tuples, lists and dictionaries

    def above_mark(self) -> list[Any]:
        height = self.marks.pop()
        taken = self.stack[height:]
        del self.stack[height:]
        return taken

    def make(self, kind: Callable[[list[Any]], Any], count: int | None = None) -> None:
        """A tuple, list or dictionary of the last `count` values, or of all above the last mark."""
        if count is None:
            taken = self.above_mark()
        else:
            taken = [self.stack.pop() for _ in range(count)][::-1]
        self.stack.append(kind(taken))

    def extend(self, taken: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError("it appends to what is no list")
        self.stack[-1].extend(taken)

    def update(self, taken: list[Any]) -> None:
        if type(self.stack[-1]) is not dict:
            raise ValueError("it sets entries of what is no dictionary")
        self.stack[-1].update(_dictionary(taken))

    # ---- calls, which are not made

    def line_of_names(self, at: int) -> int:
        module, at = self._line(at)
        name, at = self._line(at)
        self.push_name(str(module, "utf-8"), str(name, "utf-8"))
        return at

    def push_name(self, module: Any, name: Any) -> None:
        asked = "a name that is no text"
        if isinstance(module, str) and isinstance(name, str):
            asked = f"{module}.{name}"
        known = asked.replace("numpy._core.", "numpy.core.")
        if known not in NAMES:
            printable = (sign if sign.isprintable() else "?" for sign in asked[:LINE])
            raise ForeignNameError("".join(printable))
        self.stack.append(Named(known.rpartition(".")[2]))

    def call(self) -> None:
        arguments, what = self.stack.pop(), self.stack.pop()
        is_new = isinstance(what, Named) and what.arguments is None
        if not is_new or not isinstance(arguments, tuple):
            raise ValueError("it calls what cannot be called")
        self.stack.append(Named(what.name, arguments))

    def build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Named):
            raise ValueError("it gives a state to what has none")
        self.stack[-1].state = state


def _dictionary(taken: list[Any]) -> dict[str | bytes, Any]:
    if not all(isinstance(key, str | bytes) for key in taken[::2]):
        # Nested tuples may take hours to hash.
        raise ValueError("it has a dictionary with a key that is no text")
    return dict(zip(taken[::2], taken[1::2], strict=True))


Operation = Callable[[_Reader, int], int]  # takes the place behind its code, and returns the next


def _without_argument(do: Callable[[_Reader], object]) -> Operation:
    def operation(reader: _Reader, at: int) -> int:
        do(reader)
        return at

    return operation


OPERATIONS: dict[int, Operation] = {
    0x80: lambda reader, at: at + 1,  # PROTO
    0x95: lambda reader, at: at + 8,  # FRAME
    ord("N"): _without_argument(lambda reader: reader.stack.append(None)),
    0x88: _without_argument(lambda reader: reader.stack.append(True)),
    0x89: _without_argument(lambda reader: reader.stack.append(False)),
    ord("I"): _Reader.number,
    ord("L"): _Reader.number,
    ord("F"): _Reader.real,
    ord("G"): lambda reader, at: reader.packed(at, ">d"),
    ord("J"): lambda reader, at: reader.packed(at, "<i"),
    ord("M"): lambda reader, at: reader.packed(at, "<H"),
    0x8A: _Reader.long,
    ord("V"): _Reader.line_of_text,
    ord("X"): lambda reader, at: reader.text(at, "<I", "utf-8"),
    0x8D: lambda reader, at: reader.text(at, "<Q", "utf-8"),
    ord("T"): lambda reader, at: reader.text(at, "<I", None),
    ord("B"): lambda reader, at: reader.text(at, "<I", None),
    ord("C"): lambda reader, at: reader.text(at, "<B", None),
    0x8E: lambda reader, at: reader.text(at, "<Q", None),
    0x96: lambda reader, at: reader.text(at, "<Q", None),
    ord("p"): _Reader.put,
    ord("q"): lambda reader, at: reader.put(at, "<B"),
    ord("g"): _Reader.get,
    ord("h"): lambda reader, at: reader.get(at, "<B"),
    ord("j"): lambda reader, at: reader.get(at, "<I"),
    ord("("): _without_argument(lambda reader: reader.marks.append(len(reader.stack))),
    ord("0"): _without_argument(lambda reader: reader.stack.pop()),
    ord("1"): _without_argument(_Reader.above_mark),
    ord("2"): _without_argument(lambda reader: reader.stack.append(reader.stack[-1])),
    ord(")"): _without_argument(lambda reader: reader.stack.append(())),
    ord("]"): _without_argument(lambda reader: reader.stack.append([])),
    ord("}"): _without_argument(lambda reader: reader.stack.append({})),
    ord("t"): _without_argument(lambda reader: reader.make(tuple)),
    0x85: _without_argument(lambda reader: reader.make(tuple, 1)),
    0x86: _without_argument(lambda reader: reader.make(tuple, 2)),
    0x87: _without_argument(lambda reader: reader.make(tuple, 3)),
    ord("l"): _without_argument(lambda reader: reader.make(list)),
    ord("d"): _without_argument(lambda reader: reader.make(_dictionary)),
    ord("a"): _without_argument(lambda reader: reader.extend([reader.stack.pop()])),
    ord("e"): _without_argument(lambda reader: reader.extend(reader.above_mark())),
    ord("s"): _without_argument(
        lambda reader: reader.update([reader.stack.pop(-2), reader.stack.pop()])
    ),
    ord("u"): _without_argument(lambda reader: reader.update(reader.above_mark())),
    ord("c"): _Reader.line_of_names,
    0x93: _without_argument(
        lambda reader: reader.push_name(reader.stack.pop(-2), reader.stack.pop())
    ),
    ord("R"): _without_argument(_Reader.call),
    ord("b"): _without_argument(_Reader.build),
}
