"""Files that are no containers of ours are refused, unread where they are large."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

import pytest

from onepass import InputError, OnePass
from onepass.files import canonical, digest
from tests.fuzzing import in_a_process, outcome
from tests.live.altered_files import refusal, taken_apart
from tests.live.saved_cases import CASES, content_of
from tests.live.saved_learners import MIDDLE, net


def test_lengths_depths_and_repetitions_are_bounded(tmp_path: Path) -> None:
    content, case = content_of("a-gem", MIDDLE), CASES["a-gem"]
    (length,) = struct.unpack("<Q", content[:8])
    text, rest = content[8 : 8 + length], content[8 + length :]
    for number in (0, 1, 2**31, 2**62, 2**64 - 1, len(content)):
        refusal(struct.pack("<Q", number) + content[8:], case, tmp_path)
    for other in (
        b"[" * 10**6,
        b'{"a":' * 10**5,
        b"[" + b"[]," * 1_500_000 + b"[]]",
        b'{"__metadata__":{},' + text[1:],
        text.replace(b'"format\\":1', b'"format\\":1,\\"format\\":1'),
        text.replace(b'"format\\":1', b'"format\\": 1'),
    ):
        assert other != text
        refusal(struct.pack("<Q", len(other)) + other + rest, case, tmp_path)
    entries, name = json.loads(text), "module.0.weight"
    for change in (
        *({"data_offsets": [0, 2**62]}, {"data_offsets": [0, 0]}, {"data_offsets": [8, 0]}),
        *({"shape": [2**62, 2**62]}, {"shape": [0, 2**62, 2**62]}, {"shape": [1] * 500}),
        *({"shape": [True]}, {"dtype": "F99"}, {"more": 1}),
    ):
        other = json.dumps(entries | {name: entries[name] | change}).encode()
        refusal(struct.pack("<Q", len(other)) + other + rest, case, tmp_path)
    for other in (rest[:-1], rest + b"\0", b"", rest * 2):
        refusal(content[: 8 + length] + other, case, tmp_path)


VALUES = {
    "dictionaries as numbers": (r"\u007b\"a\":1}", r"\u002c"),
    "lists as numbers": (r"\u005b]", r"\u002c"),
    "commas as numbers": (r"1.5", r"\u002c"),
    "dictionaries": (r"{\"a\":1}", "," + " " * 6),
    "lists": (r"[]", "," + " " * 14),
}


@pytest.mark.parametrize(("value", "comma"), VALUES.values(), ids=VALUES)
def test_the_values_of_a_header_are_counted_however_they_are_written(
    value: str, comma: str, tmp_path: Path
) -> None:
    count = 60_000_000 // len(value + comma)
    inner = rf"{{\"checksum\":\"\",\"format\":1,\"x\":[{(value + comma) * count}0]}}"
    header = f'{{"__metadata__":{{"onepass":"{inner}"}}}}'.encode()
    (tmp_path / "file").write_bytes(struct.pack("<Q", len(header)) + header)
    module = net()
    del inner, header

    def load() -> list[str]:
        return [outcome(lambda: OnePass.load(tmp_path / "file", module), InputError, seconds=60)]

    assert in_a_process(load, 600 * 2**20) == ["refused"]


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    devices = (Path("/dev/zero"), Path("/dev/null"))
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path, *devices):
        with pytest.raises(InputError, match="not a plain file"):
            OnePass.load(path, net())
    (tmp_path / "loop").symlink_to("loop")
    for odd in (tmp_path / "loop", tmp_path / ("x" * 300), "a\0b", tmp_path / "nothing"):
        with pytest.raises(InputError, match=r"cannot (read|be)"):
            OnePass.load(odd, net())


def test_a_large_file_of_another_kind_is_refused_unread(tmp_path: Path) -> None:
    with open(tmp_path / "large", "wb") as file:
        file.truncate(2**42)
    began = time.monotonic()
    with pytest.raises(InputError, match="not a file that save"):
        OnePass.load(tmp_path / "large", net())
    content = content_of("a-gem", MIDDLE)
    with open(tmp_path / "large", "wb") as file:
        file.write(content)
        file.truncate(2**42)
    with pytest.raises(InputError, match="damaged"):
        OnePass.load(tmp_path / "large", net())
    assert time.monotonic() - began < 60


def test_a_header_of_many_tensors_is_refused_before_they_are_made(tmp_path: Path) -> None:
    about, _ = taken_apart(content_of("a-gem", MIDDLE))
    of_one = '"{:x}":{{"dtype":"F64","shape":[0],"data_offsets":[0,0]}}'.format
    entries = [of_one(number) for number in range(500_000)]
    about |= {"format": 1, "tensors": "0" * 64}
    own = json.dumps({"onepass": canonical(about | {"checksum": digest(canonical(about))})})
    header = ("{" + ",".join([f'"__metadata__":{own}', *entries]) + "}").encode()
    (tmp_path / "file").write_bytes(struct.pack("<Q", len(header)) + header)
    module = net()
    del entries, header

    def load() -> list[str]:
        return [outcome(lambda: OnePass.load(tmp_path / "file", module), InputError)]

    assert in_a_process(load, 2**29) == ["refused"]
