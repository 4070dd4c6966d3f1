"""Checkpoints: a run that was interrupted ends as if it had not been, and a damaged checkpoint is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from onepass.files import canonical, digest
from onepass.learners import METHODS, ewc
from onepass.learners.base import Reference
from onepass.metrics import Record
from onepass.protocol import Run, Setup, Snapshot, _restored, assemble, train
from onepass.recording import Recorder
from onepass.studies import checkpoint
from onepass.studies.checkpoint import Checkpoints
from tests.fuzzing import in_a_process
from tests.toys import ToyStream

SETUP = Setup(hidden=(8,), memory_per_task=6)


class StopHereError(Exception):
    pass


class Interrupting(Checkpoints):
    """Checkpoints that kill the run right after one of them was written."""

    def __init__(self, folder: Path, every: int, after: int) -> None:
        super().__init__(folder, "fleet", every)
        self._left = after

    def keep(self, snapshot: Snapshot) -> None:
        super().keep(snapshot)
        self._left -= 1
        if self._left == 0:
            raise StopHereError


def runs(name: str, count: int) -> list[Run]:
    return [
        Run(seed, dict.fromkeys(METHODS[name].hyperparameters, 0.5) | {"learning_rate": 0.2})
        for seed in range(count)
    ]


def learn(
    name: str,
    keeper: Checkpoints | None,
    count: int = 3,
    ragged: bool = True,
    setup: Setup = SETUP,
    device: str = "cpu",
) -> list[Record]:
    return train(
        ToyStream(ragged),
        "ev",
        METHODS[name],
        runs(name, count),
        setup,
        keeper=keeper,
        device=device,
    )


def assert_same(found: list[Record], expected: list[Record]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.same_as(other)
        assert one.state_bytes == other.state_bytes


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_run_that_is_interrupted_anywhere_ends_bit_identical(
    name: str, count: int, tmp_path: Path
) -> None:
    expected = learn(name, None, count)
    for stop in (2, 5):  # between tasks and in the middle of one
        folder = tmp_path / str(stop)
        with pytest.raises(StopHereError):
            learn(name, Interrupting(folder, every=3, after=stop), count)
        assert_same(learn(name, Checkpoints(folder, "fleet", every=3), count), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", METHODS)
def test_a_run_resumes_on_a_gpu(name: str, tmp_path: Path) -> None:
    expected = learn(name, None, device="cuda")
    with pytest.raises(StopHereError):
        learn(name, Interrupting(tmp_path, every=3, after=5), device="cuda")
    for found, whole in zip(
        learn(name, Checkpoints(tmp_path, "fleet", every=3), device="cuda"), expected, strict=True
    ):
        assert found.accuracy == pytest.approx(
            whole.accuracy, abs=0.05, nan_ok=True
        )  # sums on a GPU need not repeat bit by bit


@pytest.mark.parametrize("name", METHODS)
def test_resumed_parameters_are_bit_identical(name: str, tmp_path: Path) -> None:
    """Records could agree by chance: compare the last checkpoints themselves."""
    learn(name, Checkpoints(tmp_path / "whole", "fleet", every=3))
    for stop in range(1, 12, 3):
        try:
            learn(name, Interrupting(tmp_path / "cut", every=3, after=stop))
        except StopHereError:
            continue
    learn(name, Checkpoints(tmp_path / "cut", "fleet", every=3))
    assert_same_parameters(tmp_path / "whole", tmp_path / "cut")


def assert_same_parameters(one: Path, other: Path) -> None:
    whole, cut = (Checkpoints(folder, "fleet").last() for folder in (one, other))
    assert whole is not None
    assert cut is not None
    assert (whole.phase, whole.batches) == (cut.phase, cut.batches)
    assert whole.tensors.keys() == cut.tensors.keys()
    for key, tensor in whole.tensors.items():
        if key != "memory.x":  # its last place takes what is thrown away
            assert torch.equal(tensor.nan_to_num(), cut.tensors[key].nan_to_num()), key
        else:
            assert torch.equal(tensor[:, :-1], cut.tensors[key][:, :-1])


def test_reference_batches_that_are_drawn_from_a_larger_memory_go_on_where_they_were(
    tmp_path: Path,
) -> None:
    """With a reference batch of the whole memory there is nothing to draw, and a wrong step number would go unnoticed."""

    def go(keeper: Checkpoints | None) -> list[Record]:
        return train(
            ToyStream(),
            "ev",
            METHODS["a-gem"],
            runs("a-gem", 2),
            SETUP,
            Reference(reference_batch=3),
            keeper=keeper,
        )

    expected = go(None)
    go(Checkpoints(tmp_path / "whole", "fleet", every=2))
    for stop in (5, 8):
        with pytest.raises(StopHereError):
            go(Interrupting(tmp_path / str(stop), every=2, after=stop))
        assert_same(go(Checkpoints(tmp_path / str(stop), "fleet", every=2)), expected)
        assert_same_parameters(tmp_path / "whole", tmp_path / str(stop))


def test_a_fisher_estimate_that_is_half_done_goes_on(tmp_path: Path) -> None:
    def go(keeper: Checkpoints | None) -> list[Record]:
        return train(
            ToyStream(),
            "ev",
            METHODS["ewc"],
            runs("ewc", 2),
            SETUP,
            ewc.Options(fisher="moving-average", fisher_every=4),
            keeper=keeper,
        )

    go(Checkpoints(tmp_path / "whole", "fleet", every=3))
    with pytest.raises(StopHereError):
        go(Interrupting(tmp_path / "cut", every=3, after=3))
    go(Checkpoints(tmp_path / "cut", "fleet", every=3))
    assert_same_parameters(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("policy", ["ring", "reservoir", "class-reservoir"])
@pytest.mark.parametrize("current", [False, True])
def test_every_kind_of_memory_resumes(policy: str, current: bool, tmp_path: Path) -> None:
    setup = replace(
        SETUP, memory=policy, memory_includes_current_task=current, memory_with_replacement=current
    )  # type: ignore[arg-type]
    expected = learn("a-gem", None, setup=setup)
    with pytest.raises(StopHereError):
        learn("a-gem", Interrupting(tmp_path, every=4, after=3), setup=setup)
    assert_same(learn("a-gem", Checkpoints(tmp_path, "fleet", every=4), setup=setup), expected)


def test_a_diverged_row_stays_diverged_after_resuming(tmp_path: Path) -> None:
    rows = [Run(0, {"learning_rate": 0.2}), Run(1, {"learning_rate": 1e9})]

    def go(keeper: Checkpoints | None) -> list[Record]:
        return train(ToyStream(), "ev", METHODS["van"], rows, SETUP, keeper=keeper)

    expected = go(None)
    assert [record.diverged for record in expected] == [False, True]
    with pytest.raises(StopHereError):
        go(Interrupting(tmp_path, every=4, after=3))
    assert_same(go(Checkpoints(tmp_path, "fleet", every=4)), expected)


def test_checkpoints_nobody_asked_for_cost_half_a_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now)
    keeper = Checkpoints(tmp_path, "fleet")
    now += checkpoint.PATIENCE - 1
    assert not keeper.due(0, 0)
    now += 1
    assert keeper.due(0, 0)
    assert not keeper.due(7, 6)
    now += checkpoint.LONG
    assert keeper.due(7, 6), "a task may be the whole stream"
    write = checkpoint.write_here

    def slow(path: Path, content: bytes) -> None:
        nonlocal now
        now += 1
        write(path, content)

    monkeypatch.setattr(checkpoint, "write_here", slow)
    keeper.keep(SNAPSHOT)  # two files: two seconds
    now += 2 / checkpoint.SHARE - 1
    assert not keeper.due(0, 0)
    now += 1
    assert keeper.due(0, 0)


SNAPSHOT = Snapshot(
    1,
    4,
    {"theta": torch.arange(12.0).view(3, 4), "alive": torch.tensor([True, False])},
    {"seconds": 0.1},
)


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_last_two_are_kept_and_nothing_temporary_is_left(tmp_path: Path) -> None:
    keeper = Checkpoints(tmp_path, "fleet")
    for batches in (4, 8, 12):
        keeper.keep(replace(SNAPSHOT, batches=batches))
    assert kept(tmp_path) == [
        "0001-00000008.json",
        "0001-00000008.safetensors",
        "0001-00000012.json",
        "0001-00000012.safetensors",
    ]


def two(folder: Path) -> Checkpoints:
    keeper = Checkpoints(folder, "fleet")
    keeper.keep(SNAPSHOT)
    keeper.keep(replace(SNAPSHOT, batches=8))
    return keeper


def harm_tensors(folder: Path) -> None:
    path = folder / "0001-00000008.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def harm_json(folder: Path) -> None:
    path = folder / "0001-00000008.json"
    path.write_bytes(path.read_bytes().replace(b'"batches":8', b'"batches":9'))


def other_configuration(folder: Path) -> None:
    rewrite(folder, fleet="another")


def other_format(folder: Path) -> None:
    rewrite(folder, format=99)


def rewrite(folder: Path, **changes: object) -> None:
    path = folder / "0001-00000008.json"
    about = json.loads(path.read_text()) | changes
    del about["checksum"]
    path.write_text(canonical(about | {"checksum": digest(canonical(about))}))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (harm_tensors, "0001-00000008.safetensors is missing, truncated or altered"),
        (harm_json, "it was altered"),
        (lambda folder: (folder / "0001-00000008.safetensors").unlink(), "is missing"),
        (lambda folder: (folder / "0001-00000008.json").write_bytes(b""), "damaged"),
        (lambda folder: (folder / "0001-00000008.json").write_bytes(b"[" * 100_000), "damaged"),
        (other_configuration, "another configuration"),
        (other_format, "its format is 99"),
        (
            lambda folder: rewrite(folder, software="another version"),
            "it was made with another version",
        ),
    ],
)
def test_a_bad_checkpoint_is_refused_with_its_reason_and_the_one_before_is_used(
    harm: Callable[[Path], None], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = two(tmp_path)
    harm(tmp_path)
    found = keeper.last()
    assert found is not None
    assert found.batches == 4
    assert reason in caplog.text


def test_new_checkpoints_replace_refused_ones(tmp_path: Path) -> None:
    two(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(b"")
    keeper = Checkpoints(tmp_path, "fleet")
    assert keeper.last() is None
    keeper.keep(replace(SNAPSHOT, batches=1))
    keeper.keep(replace(SNAPSHOT, batches=2))
    assert kept(tmp_path) == [
        "0001-00000001.json",
        "0001-00000001.safetensors",
        "0001-00000002.json",
        "0001-00000002.safetensors",
    ]


def test_without_a_sound_checkpoint_there_is_none(tmp_path: Path) -> None:
    keeper = two(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(b"")
    assert keeper.last() is None


# ---- checkpoints that were written to deceive: their hashes and checksums are right


BAD: tuple[object, ...] = (
    None,
    True,
    -1,
    10**9,
    10**400,
    0.5,
    "x",
    [],
    [[]],
    {},
    {"grown": 10**6},
    [None, None, None],
    [[-1], [-1], [-1]],
)


def crafted(sound: Snapshot) -> list[tuple[str, Snapshot]]:
    """A snapshot with any number, and any tensor, replaced or taken away."""
    made = [
        (f"{key}={bad!r:.20}", replace(sound, **{key: bad}))
        for key in ("phase", "batches", "numbers")
        for bad in BAD
    ]  # type: ignore[arg-type]
    made += [
        (f"{key}={value}", replace(sound, **{key: value}))
        for key, value in (("phase", 3), ("batches", 400))
    ]  # type: ignore[arg-type]
    for part, values in sound.numbers.items():
        made += [
            (f"{part}={bad!r:.20}", replace(sound, numbers=sound.numbers | {part: bad}))
            for bad in BAD
        ]
        for key in values if isinstance(values, dict) else ():
            made += [
                (
                    f"{part}.{key}={bad!r:.20}",
                    replace(sound, numbers=sound.numbers | {part: values | {key: bad}}),
                )
                for bad in BAD
            ]
    for name, tensor in sound.tensors.items():
        for what, other in {
            "none": None,
            "one more row": torch.cat([tensor, tensor[:1]]) if tensor.ndim else tensor[None],
            "a row": tensor[:1] if tensor.ndim else tensor[None, None],
            "flat": tensor.reshape(-1)[:5],
            "empty": torch.zeros(0),
            "another kind": tensor.to(torch.int16),
        }.items():
            tensors = {key: value for key, value in sound.tensors.items() if key != name} | (
                {} if other is None else {name: other}
            )
            made.append((f"{name}: {what}", replace(sound, tensors=tensors)))
    made += [
        (f"also {name}", replace(sound, tensors=sound.tensors | {name: torch.zeros(1)}))
        for name in ("memory.rows", "record.phase", "x")
    ]
    return made


@pytest.mark.parametrize("name", ["a-gem", "ewc", "prog-nn", "icarl"])
def test_a_crafted_checkpoint_is_refused_or_fits(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StopHereError):
        learn(name, Interrupting(tmp_path, every=3, after=4))
    sound = Checkpoints(tmp_path, "fleet").last()
    assert sound is not None
    refused = fits = 0
    for _, snapshot in [("as it is", sound), *crafted(sound)]:
        feed, fleet, learner = assemble(
            ToyStream(ragged=True), "ev", METHODS[name], runs(name, 3), SETUP
        )
        went_on = _restored(
            copy.deepcopy(snapshot), feed, fleet, learner, Recorder(fleet, learner, feed, True)
        )
        refused, fits = refused + (not went_on), fits + went_on
    assert refused > 100
    assert 1 <= fits < 50
    print(name, refused, fits)


def test_runs_whose_checkpoint_does_not_fit_begin_anew_and_end_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = learn("a-gem", None)
    with pytest.raises(StopHereError):
        learn("a-gem", Interrupting(tmp_path, every=3, after=4))
    keeper = Checkpoints(tmp_path, "fleet", every=1000)
    sound = keeper.last()
    assert sound is not None
    keeper.keep(
        replace(
            sound,
            phase=sound.phase + 1,
            tensors=sound.tensors | {"record.accuracy": torch.zeros(2, 2)},
        )
    )
    assert_same(learn("a-gem", Checkpoints(tmp_path, "fleet", every=1000)), expected)
    assert "begin anew" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"phase": None},
        {"phase": -1},
        {"batches": "x"},
        {"numbers": []},
        {"tensors": 3},
        {"format": None},
        {"fleet": []},
        {"phase": 10**400},
    ],
)
def test_a_checkpoint_whose_description_is_crafted_is_refused(
    changes: dict[str, object], tmp_path: Path
) -> None:
    keeper = two(tmp_path)
    rewrite(tmp_path, **changes)
    found = keeper.last()
    assert found is not None
    assert found.batches == 4
    path = tmp_path / "0001-00000008.json"
    for content in (
        b"[]",
        b"3",
        b'{"checksum": 3}',
        b"\xff",
        b'{"checksum":"' + digest("{}").encode() + b'"}',
    ):
        path.write_bytes(content)
        found = keeper.last()
        assert found is not None
        assert found.batches == 4


@pytest.mark.parametrize("value", ["[]", '{"a":1}', "{}", "1.5", '""'])
def test_a_checkpoint_of_many_values_takes_little_memory(value: str, tmp_path: Path) -> None:
    path = tmp_path / "0001-00000008.json"
    path.write_text(f'{{"x":[{f"{value}," * ((2**26 - 100) // (len(value) + 1))}0]}}')
    keeper = Checkpoints(tmp_path, "fleet")
    assert in_a_process(lambda: [str(keeper.last())], 2**29) == ["None"]
    path.write_text(f'{{"x":[{f"{value}," * ((2**24 - 100) // (len(value) + 1))}0]}}')
    assert in_a_process(lambda: [str(keeper.last())]) == ["None"]


def test_a_checkpoint_of_many_tensors_takes_little_memory(tmp_path: Path) -> None:
    keeper = two(tmp_path)
    entries = (
        f'"{number:x}":{{"dtype":"F64","shape":[0],"data_offsets":[0,0]}}'
        for number in range(500_000)
    )
    header = ("{" + ",".join(entries) + "}").encode()
    content = len(header).to_bytes(8, "little") + header
    (tmp_path / "0001-00000008.safetensors").write_bytes(content)
    rewrite(tmp_path, tensors=digest(content))
    del header, content

    def last() -> list[str]:
        found = keeper.last()
        return ["none" if found is None else str(found.batches)]

    assert in_a_process(last, 2**29) == ["4"]
