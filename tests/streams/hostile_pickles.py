"""Small files that ask for much: short programs in the language of pickles."""

from __future__ import annotations

import struct

# The state of the array follows.
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
BYTES = b"cnumpy\ndtype\n\x8c\x02u1\x89\x88\x87R"


def dictionary(data: bytes, labels: bytes) -> bytes:
    """A pickle with these programs for its two entries."""
    return b"\x80\x04}(\x8c\x04data" + data + b"\x8c\x0bfine_labels" + labels + b"u."


def array(shape: bytes, raw: bytes = b"C\x00") -> bytes:
    return ARRAY + b"(K\x01" + shape + BYTES + b"\x89" + raw + b"tb"


def nest(times: int, kind: bytes, width: int = 10) -> bytes:
    """A value that holds another one `width` times, which holds another one `width` times, …"""
    opening, closing = {b"list": (b"](", b"e"), b"tuple": (b"(", b"t")}[kind]
    made = b"K\x01r" + struct.pack("<I", 0)
    for level in range(times):
        inner = (b"j" + struct.pack("<I", level)) * width
        made += b"0" + opening + inner + closing + b"r" + struct.pack("<I", level + 1)
    return made


LABELS = b"](K\x00K\x01e"
DATA = array(b"K\x02M\x00\x0c\x86", b"B" + struct.pack("<I", 2 * 3072) + bytes(2 * 3072))
LARGE = b"\x8a\xff" + b"\x7f" * 255  # a number of 255 bytes
LISTS, TUPLES = nest(30, b"list"), nest(30, b"tuple")
PROGRAMS: dict[str, bytes] = {
    "lists of lists as labels": dictionary(DATA, LISTS),
    "tuples of tuples as labels": dictionary(DATA, TUPLES),
    "lists of lists as data": dictionary(LISTS, LABELS),
    "tuples of tuples as data": dictionary(TUPLES, LABELS),
    "lists of lists as a shape": dictionary(array(LISTS), LABELS),
    "tuples of tuples as a shape": dictionary(array(TUPLES), LABELS),
    "lists of lists as bytes": dictionary(array(b"K\x01K\x01\x86", LISTS), LABELS),
    "tuples of tuples as bytes": dictionary(array(b"K\x01K\x01\x86", TUPLES), LABELS),
    "tuples of tuples as a key": b"\x80\x04}" + nest(40, b"tuple") + b"Ns.",
    "tuples of tuples as the keys of a dictionary": b"\x80\x02(" + nest(40, b"tuple") + b"Nd.",
    "tuples of tuples as a name": b"\x80\x04" + TUPLES + b"2\x93.",
    "tuples of tuples as the arguments of a type": dictionary(
        ARRAY + b"(K\x01K\x01\x85cnumpy\ndtype\n" + TUPLES + b"R\x89C\x00tb", LABELS
    ),
    "the last place of the memo": b"\x80\x02]r\xff\xff\xff\xff.",
    "a place of the memo for 16 gigabytes": b"\x80\x02]r\x00\x00\x00\x7f.",
    "a place of the memo in text": b"]p1000000000\n.",
    "a place of the memo of many digits": b"]p" + b"9" * 5000 + b"\n.",
    "bytes without end": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x",
    "bytes that may be changed, without end": b"\x80\x05\x96" + struct.pack("<Q", 2**33) + b"x",
    "text without end": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x",
    "text of 4 gigabytes": b"\x80\x02X\xff\xff\xff\xffx",
    "bytes of 2 gigabytes": b"\x80\x02T\xff\xff\xff\x7fx",
    "bytes of a negative length": b"\x80\x02T\xff\xff\xff\xffx",
    "a frame without end": b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"].",
    "a number without end": b"\x80\x02\x8b\xff\xff\xff\x7f",
    "a number of many digits": b"I" + b"9" * 100_000 + b"\n.",
    "long numbers as labels": dictionary(DATA, b"](" + LARGE + LARGE + b"e"),
    "tuples within tuples": b"\x80\x02)" + b"\x85" * 200_000 + b".",
    "lists within lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "marks within marks": b"\x80\x02" + b"(" * 900_000 + b".",
    "copies of copies": b"\x80\x02](]" + b"2" * 900_000 + b"e.",
    "a list in itself": b"\x80\x02}(\x8c\x04data]q\x00h\x00a\x8c\x0bfine_labelsh\x00u.",
    "more operations than a file of that kind has": b"\x80\x02" + b"N0" * 2_000_000 + b"N.",
    "more numbers than a file of that kind has": b"\x80\x02(" + b"K\x01" * 2_000_000 + b"l.",
    "an array of terabytes": dictionary(
        array(b"\x8a\x06\x00\x00\x00\x00\x00\x01M\x00\x0c\x86"), LABELS
    ),
    "an array of negative size": dictionary(array(b"J\xff\xff\xff\xffM\x00\x0c\x86"), LABELS),
    "an array of many dimensions": dictionary(array(b"(" + LARGE + b"2" * 500 + b"t"), LABELS),
    "an empty array of endless rows": dictionary(array(b"K\x00" + LARGE + b"\x86"), b"]"),
    "text that is no latin1": dictionary(
        array(b"K\x01K\x01\x86", b"c_codecs\nencode\n\x8c\x03\xe2\x82\xac\x8c\x06latin1\x86R"),
        LABELS,
    ),
    "a name of two lines": b"\x80\x04\x8c\x03os\n\x8c\x06sys\ntm\x93.",
    "a name without end": b"c" + b"x" * 1_000_000,
    "a state for a list": b"\x80\x02]}b.",
    "a call of a number": b"\x80\x02K\x01)R.",
    "an entry of a list": b"\x80\x02]NNs.",
    "an object by an old operation": b"(ios\nsystem\n.",
    "an object by a new operation": b"\x80\x02cnumpy\nndarray\n)\x81.",
    "an operation on nothing": b"\x80\x02R.",
    "a number behind the end": b"\x80\x02K",
    "a mark that is gone": b"\x80\x02(1t.",
    "a value that is not in the memo": b"\x80\x02h\x07.",
}
