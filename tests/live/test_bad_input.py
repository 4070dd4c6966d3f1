"""Whatever is wrong with what a learner is given, it says so in one sentence, and everything is as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from onepass import InputError, Memory, OnePass
from onepass.learners import METHODS
from toys import FEATURES, small_net

CLASSES = 4
CORRECTING = ["gem", "s-gem", "a-gem", "mega-1", "mega-2"]  # they look at the memory in a pass of its own
LIVE = [name for name, found in METHODS.items() if not found.joined and not found.learner.own_network]


class Rich(nn.Module):
    """Buffers that move, layers that draw random numbers, a part that is frozen, another that is always in evaluation; and trouble on demand.

    Trouble comes in the pass of that number (in training) since `trouble` was set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.still = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.body = nn.Linear(FEATURES, 7)
        self.norm = nn.BatchNorm1d(7)
        self.drop = nn.Dropout(0.3)
        self.aside = nn.Dropout(0.9)
        self.head = nn.Linear(7, CLASSES)
        self.make(None)

    def make(self, trouble: str | None, at: int = 1) -> None:
        self.trouble, self.left = trouble, at

    def forward(self, x: Tensor) -> Any:
        out = self.head(self.aside(self.drop(self.norm(torch.tanh(self.body(self.still(x)))))))
        self.left -= self.training
        if self.left != 0 or not self.training:
            return out
        match self.trouble:
            case "nan" | "inf":
                return out * float(self.trouble)
            case "gradient":  # adds nothing, with a slope that is not a number
                return out + (out - out.detach()).sum().abs().sqrt()
            case "shape":
                return out[:, :1, None]
            case "tuple":
                return out, out
            case None:
                return out
        raise {
            "runtime": RuntimeError,
            "value": ValueError,
            "type": TypeError,
            "index": IndexError,
            "attribute": AttributeError,
            "key": KeyError,
            "assertion": AssertionError,
        }[self.trouble](f"no {self.trouble}\nand a second line")


def batch(size: int = 8, seed: int = 0, classes: range = range(CLASSES)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, FEATURES, generator=generator), torch.randint(classes.start, classes.stop, (size,), generator=generator)


def in_a_second_task(method: str = "a-gem", module: nn.Module | None = None, adam: bool = True, **settings: Any) -> OnePass:
    """A learner with a past, in the middle of a task."""
    module = Rich() if module is None else module
    if adam:
        settings["optimizer"] = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=0.01)
    else:
        settings["learning_rate"] = 0.05
    if method == "icarl":
        settings["tasks"] = [[0, 1], [2, 3]]
    learner = OnePass(module, method, **settings)
    heads = method == "icarl"
    one = [batch(seed=s, classes=range(2) if heads else range(CLASSES)) for s in range(3)]
    two = [batch(seed=s, classes=range(2, 4) if heads else range(CLASSES)) for s in range(3, 5)]
    if not learner.classifies:
        one, two = [(x, x[:, :CLASSES]) for x, _ in one], [(x, -x[:, :CLASSES]) for x, _ in two]
    for x, y in one:
        learner.observe(x, y)
    if not learner.task_free:
        learner.end_task(again=one if learner.learner.needs_review else None)
    for x, y in two:
        learner.observe(x, y)
    if isinstance(module, Rich):
        module.aside.eval()
    return learner


def snapshot(learner: OnePass) -> dict[str, Any]:
    """All that a refused call must not change."""
    module, optimizer = learner.module, learner.fleet.optimizer
    return copy.deepcopy(
        {
            "values": {name: t.detach().clone() for name, t in [*module.state_dict().items(), *module.named_buffers()]},
            "which": [(name, id(p), p.data_ptr(), p.requires_grad, p.grad is None) for name, p in module.named_parameters()],
            "layers": [str(part) for part in module.modules()],
            "modes": [part.training for part in module.modules()],
            "optimizer": None if optimizer is None else optimizer.state_dict(),
            "learner": (learner.learner.state(), learner.learner.counters()),
            "memory": None if learner.memory is None else (learner.memory.state(), learner.memory.counters(), learner.memory.nbytes),
            "place": (learner.steps, int(learner.fleet.step), learner.violations, learner.segment, learner.batches, learner.task),
            "kind": (learner.outputs, learner.examples, learner.fleet.slots),
            "luck": torch.get_rng_state(),
        }
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        here = isinstance(other, Tensor) and one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
        return here and (one.is_meta or torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def check_sentence(error: BaseException, words: tuple[str, ...]) -> None:
    message = str(error)
    assert type(error) is InputError
    assert isinstance(error, ValueError)
    assert len(message.splitlines()) == 1
    for word in words:
        assert word in message


@contextmanager
def refused(learner: OnePass, *words: str) -> Iterator[None]:
    """What happens inside raises an error of one sentence with these words, and changes nothing."""
    before = snapshot(learner)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - what it says is looked at below
        yield
    check_sentence(caught.value, words)
    after = snapshot(learner)
    changed = [key for key in before if not same(before[key], after[key])]
    assert not changed, "a refused call changed something"


# ---- batches

X_BAD: dict[str, tuple[Callable[[Tensor], Any], tuple[str, ...]]] = {
    "nan": (lambda x: x.clone().index_fill_(0, torch.tensor(3), torch.nan), ("x ", "not finite", "clean or drop")),
    "inf": (lambda x: x.clone().index_fill_(1, torch.tensor(2), torch.inf), ("not finite",)),
    "inf of both signs": (lambda x: torch.cat([x[:-2], x[-2:] * torch.tensor([[torch.inf], [-torch.inf]])]), ("not finite",)),
    "nan in an array": (lambda x: np.where(x.numpy() > 1, np.nan, x.numpy()).astype(np.float32), ("not finite",)),
    "too many features": (lambda x: torch.cat([x, x], 1), ("[8, 12]", "6]", "reshape")),
    "too few features": (lambda x: x[:, :-1], ("[8, 5]", "reshape")),
    "one dimension more": (lambda x: x[:, None], ("[8, 1, 6]", "reshape")),
    "one dimension less": (lambda x: x[:, 0], ("[8]", "reshape")),
    "a single number": (lambda x: x[0, 0], ("single number",)),
    "float64": (lambda x: x.double(), ("float64", "float32", "convert")),
    "float16": (lambda x: x.half(), ("float16", "float32", "convert")),
    "float8": (lambda x: x.to(torch.float8_e4m3fn), ("float8",)),
    "whole numbers": (lambda x: x.long(), ("int64", "float32", "convert")),
    "float64 array": (lambda x: x.double().numpy(), ("float64", "convert")),
    "complex": (lambda x: x.to(torch.complex64), ("complex", "convert")),
    "sparse": (lambda x: x.to_sparse(), ("sparse", "convert")),
    "on a device without data": (lambda x: x.to("meta"), ("meta",)),
    "array of words": (lambda x: np.array(["a"] * len(x)), ("array of", "convert")),
    "array of objects": (lambda x: np.array([None] * len(x)), ("array of object", "convert")),
    "empty": (lambda x: x[:0], ("empty batch",)),
    "nothing": (lambda x: None, ("tensor", "NoneType")),
    "lists": (lambda x: x.tolist(), ("tensor", "list")),
    "no inputs": (lambda x: (), ("no inputs",)),
    "a dictionary": (lambda x: {"x": x}, ("names", "same")),
    "empty dictionary": (lambda x: {}, ("no inputs",)),
    "two inputs": (lambda x: (x, x), ("2 inputs", "1 inputs")),
}


@pytest.mark.parametrize("case", X_BAD)
def test_a_batch_with_bad_inputs_is_refused(case: str) -> None:
    learner = in_a_second_task()
    spoil, words = X_BAD[case]
    x, y = batch(seed=9)
    with refused(learner, *words):
        learner.observe(spoil(x), y)


@pytest.mark.parametrize("case", X_BAD)
def test_questions_about_bad_inputs_are_refused(case: str) -> None:
    learner = in_a_second_task()
    spoil, words = X_BAD[case]
    x, _ = batch(seed=9)
    for ask in (learner.predict, learner.scores):
        with refused(learner, *words):
            ask(spoil(x))


@pytest.mark.parametrize("case", sorted(X_BAD.keys() - {"a dictionary"}))
def test_a_first_batch_with_bad_inputs_is_refused_by_us_or_by_the_module(case: str) -> None:
    learner = OnePass(Rich(), learning_rate=0.1)
    spoil, _ = X_BAD[case]
    x, y = batch(seed=9)
    with refused(learner):
        learner.observe(spoil(x), y)
    learner.observe(x, y)
    assert learner.steps == 1


Y_BAD: dict[str, tuple[Callable[[Tensor], Any], tuple[str, ...]]] = {
    "too large": (lambda y: y.clone().fill_(CLASSES), ("label 4", "4 outputs", "grow=True")),
    "negative": (lambda y: y - CLASSES, ("out of range", "from 0")),
    "ignored as in torch": (lambda y: y.clone().index_fill_(0, torch.tensor(0), -100), ("-100", "out of range")),
    "floats": (lambda y: y.float(), ("whole number", "float32", "loss of your own")),
    "float array": (lambda y: y.double().numpy(), ("whole number", "float64")),
    "truth values": (lambda y: y > 1, ("whole number", "bool")),
    "one-hot": (lambda y: nn.functional.one_hot(y, CLASSES), ("whole number", "[8, 4]")),
    "a column": (lambda y: y[:, None], ("whole number", "[8, 1]")),
    "too few": (lambda y: y[:-1], ("8 examples", "7")),
    "too many": (lambda y: torch.cat([y, y]), ("8 examples", "16")),
    "empty": (lambda y: y[:0], ("y is an empty batch",)),
    "a list": (lambda y: y.tolist(), ("y must be a tensor", "list")),
    "nothing": (lambda y: None, ("y must be a tensor", "NoneType")),
    "words": (lambda y: np.array(["cat"] * len(y)), ("y is an array",)),
}


@pytest.mark.parametrize("case", Y_BAD)
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
def test_a_batch_with_bad_labels_is_refused(case: str, first: bool) -> None:
    learner = OnePass(Rich(), learning_rate=0.1) if first else in_a_second_task()
    spoil, words = Y_BAD[case]
    x, y = batch(seed=9)
    with refused(learner, *words):
        learner.observe(x, spoil(y))


def test_a_label_that_is_not_of_the_task_is_refused() -> None:
    learner = OnePass(Rich(), learning_rate=0.1, tasks={"animals": [0, 1], "plants": [2, 3]})
    learner.observe(*batch(classes=range(2)), task="animals")
    x, y = batch(classes=range(4))
    with refused(learner, "label 2", "'animals'", "0, 1"):
        learner.observe(x, y)
    with refused(learner, "label 0", "'plants'", "2, 3"):
        learner.observe(x, y, task="plants")


def test_tasks_with_more_classes_than_the_module_has_outputs_are_refused() -> None:
    learner = OnePass(small_net(3), learning_rate=0.1, tasks=[[0, 1], [2, 3]])
    with refused(learner, "up to 3", "3 outputs", "grow=True"):
        learner.observe(*batch(classes=range(2)))


def test_a_label_that_would_need_thousands_of_outputs_is_refused() -> None:
    learner = OnePass(small_net(3), learning_rate=0.1, grow=True)
    learner.observe(*batch(classes=range(3)))
    x, y = batch()
    with refused(learner, "label 1000000", "densely"):
        learner.observe(x, y + 1_000_000 - int(y.max()))


@pytest.mark.parametrize(
    ("task", "words"),
    [("c", ("unknown task 'c'", "a, b")), (1, ("unknown task '1'",)), (1.5, ("float",)), (["a"], ("list",)), (True, ("bool",)), (b"a", ("bytes",))],
)
def test_a_task_that_does_not_exist_is_refused(task: Any, words: tuple[str, ...]) -> None:
    learner = OnePass(Rich(), learning_rate=0.1, tasks={"a": [0, 1], "b": [2, 3]})
    x, y = batch(classes=range(2))
    learner.observe(x, y)
    with refused(learner, *words):
        learner.observe(x, y, task=task)
    with refused(learner):
        learner.predict(x, task=task)
    with refused(learner):
        learner.scores(x, task=task)


def test_a_task_on_a_task_free_stream_is_refused() -> None:
    learner = in_a_second_task(task_free=True)
    x, y = batch(seed=9)
    with refused(learner, "task-free", "leave"):
        learner.observe(x, y, task=1)
    with refused(learner, "task-free", "no task to end"):
        learner.end_task()


def test_a_batch_beyond_the_declared_tasks_is_refused() -> None:
    learner = OnePass(Rich(), learning_rate=0.1, tasks=[[0, 1]])
    x, y = batch(classes=range(2))
    learner.observe(x, y)
    learner.end_task()
    with refused(learner, "all 1 declared tasks"):
        learner.observe(x, y)


def test_icarl_learns_tasks_in_their_order_or_says_so() -> None:
    learner = OnePass(Rich(), "icarl", learning_rate=0.1, tasks={"a": [0, 1], "b": [2, 3]})
    one, two = batch(classes=range(2)), batch(classes=range(2, 4))
    with refused(learner, "order", "'a'"):
        learner.observe(*two, task="b")
    for name, pair in (("a", one), ("b", two)):
        learner.observe(*pair, task=name)
        with refused(learner, "again"):
            learner.observe(*pair, task="a" if name == "b" else "b")
        learner.end_task(again=[pair])
    for name, pair in (("a", one), ("b", two)):
        with refused(learner):
            learner.observe(*pair, task=name)


# ---- several inputs


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(FEATURES, CLASSES), nn.Linear(3, CLASSES)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        out: Tensor = self.left(left) + self.right(right)
        return out


SEVERAL: dict[str, tuple[Callable[[Tensor, Tensor], Any], tuple[str, ...]]] = {
    "one missing": (lambda a, b: {"left": a}, ("'left'", "'right'", "same")),
    "one too many": (lambda a, b: {"left": a, "right": b, "up": b}, ("'up'", "same")),
    "another name": (lambda a, b: {"left": a, "write": b}, ("'write'", "'right'")),
    "no names": (lambda a, b: (a, b), ("'left', 'right'",)),
    "nan in one": (lambda a, b: {"left": a, "right": b * torch.nan}, ("x['right']", "not finite")),
    "fewer examples in one": (lambda a, b: {"left": a, "right": b[:-1]}, ("8 examples", "7")),
    "wrong shape of one": (lambda a, b: {"left": a, "right": a}, ("x['right']", "shape")),
    "exchanged": (lambda a, b: {"left": b, "right": a}, ("x['left']", "shape")),
    "wrong kind of one": (lambda a, b: {"left": a, "right": b.long()}, ("x['right']", "int64")),
    "a number among them": (lambda a, b: {"left": a, "right": 3}, ("x['right']", "int")),
}


@pytest.mark.parametrize("case", SEVERAL)
def test_bad_dictionaries_of_inputs_are_refused(case: str) -> None:
    learner = OnePass(Pair(), learning_rate=0.1)
    x, y = batch()
    learner.observe({"left": x, "right": x[:, :3]}, y)
    spoil, words = SEVERAL[case]
    with refused(learner, *words):
        learner.observe(spoil(x, x[:, :3]), y)
    with refused(learner, *words):
        learner.predict(spoil(x, x[:, :3]))
    learner.observe({"right": x[:, :3], "left": x}, y)  # the order of names means nothing


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda a, b: (a,), ("1 inputs", "2 inputs")),
        (lambda a, b: (a, b, b), ("3 inputs", "2 inputs")),
        (lambda a, b: (b, a), ("x[0]", "shape")),
        (lambda a, b: (a, b * torch.inf), ("x[1]", "not finite")),
        (lambda a, b: (a, b[:2]), ("x[1] has 2",)),
        (lambda a, b: {"left": a, "right": b}, ("names", "2 inputs")),
    ],
)
def test_bad_tuples_of_inputs_are_refused(given: Callable[[Tensor, Tensor], Any], words: tuple[str, ...]) -> None:
    learner = OnePass(Pair(), learning_rate=0.1)
    x, y = batch()
    learner.observe((x, x[:, :3]), y)
    with refused(learner, *words):
        learner.observe(given(x, x[:, :3]), y)


def test_names_that_forward_does_not_have_are_refused() -> None:
    learner = OnePass(Pair(), learning_rate=0.1)
    x, y = batch()
    with refused(learner, "refused the batch", "up"):
        learner.observe({"left": x, "up": x[:, :3]}, y)
    with refused(learner):
        learner.observe({0: x, 1: x[:, :3]}, y)


def test_a_sequence_of_another_length_is_refused() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.lstm, self.head = nn.Embedding(11, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.lstm(self.words(x))[0][:, -1])
            return out

    learner = OnePass(Reader(), learning_rate=0.1)
    words, (_, y) = torch.randint(0, 11, (8, 5)), batch()
    learner.observe(words, y)
    with refused(learner, "[8, 4]", "5]", "pad"):
        learner.observe(words[:, :4], y)
    with refused(learner, "refused the batch", "index out of range"):
        learner.observe(words + 11, y)


@pytest.mark.parametrize("trouble", ["runtime", "key"])
def test_somebody_who_watches_does_not_change_what_is_refused(trouble: str) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(11, 4), nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            if trouble == "key" and int(x.max()) > 10:
                raise KeyError("no such word")
            out: Tensor = self.head(self.words(x).mean(1))
            return out

    reports: list[dict[str, Any]] = []
    learner = OnePass(Reader(), learning_rate=0.1, watch=reports.append, watch_every=2)
    words, (_, y) = torch.randint(0, 11, (8, 5)), batch()
    learner.observe(words, y)
    with refused(learner, "refused the batch"):
        learner.observe(words + 11, y)
    assert not reports
    learner.observe(words, y)
    assert [report["step"] for report in reports] == [2]


def test_a_batch_of_one_for_batch_norm_is_refused() -> None:
    learner = in_a_second_task()
    with refused(learner, "refused the batch", "more than 1 value", "nothing was learnt"):
        learner.observe(*batch(1))


# ---- modules and losses in trouble

TROUBLE = {
    "nan": ("the loss of this batch is nan", "smaller steps"),
    "inf": ("the loss of this batch is",),
    "gradient": ("gradient", "not finite", "nothing was learnt"),
    "shape": ("refused the batch",),
    "tuple": ("refused the batch",),
    "runtime": ("refused the batch", "no runtime", "nothing was learnt"),
    "value": ("refused the batch", "no value"),
    "type": ("refused the batch", "no type"),
    "index": ("refused the batch", "no index"),
    "attribute": ("refused the batch", "no attribute"),
    "key": ("refused the batch", "no key"),
    "assertion": ("refused the batch", "no assertion"),
}


@pytest.mark.parametrize("trouble", TROUBLE)
def test_a_module_in_trouble_changes_nothing(trouble: str) -> None:
    learner = in_a_second_task()
    learner.module.make(trouble)  # type: ignore[operator]
    with refused(learner, *TROUBLE[trouble]):
        learner.observe(*batch(seed=9))
    learner.module.make(None)  # type: ignore[operator]
    learner.observe(*batch(seed=9))


@pytest.mark.parametrize("method", LIVE)
@pytest.mark.parametrize("trouble", ["nan", "gradient", "runtime"])
def test_trouble_changes_nothing_in_any_method(method: str, trouble: str) -> None:
    learner = in_a_second_task(method, adam=False)
    learner.module.make(trouble)  # type: ignore[operator]
    with refused(learner, *TROUBLE[trouble]):
        learner.observe(*batch(seed=9, classes=range(2, 4)))


@pytest.mark.parametrize("method", CORRECTING)
@pytest.mark.parametrize("trouble", ["nan", "gradient", "runtime"])
def test_trouble_on_the_memory_is_refused_and_changes_nothing(method: str, trouble: str) -> None:
    learner = in_a_second_task(method, adam=False)
    learner.module.make(trouble, at=2)  # type: ignore[operator]
    with refused(learner, "memory" if trouble == "nan" else TROUBLE[trouble][0]):
        learner.observe(*batch(seed=9))


@pytest.mark.parametrize("trouble", ["runtime", "attribute", "key", "assertion"])
def test_a_module_that_fails_to_answer_is_one_sentence(trouble: str) -> None:
    class Mute(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rich = Rich()

        def forward(self, x: Tensor) -> Any:
            self.rich.make(trouble if not self.training else None)
            self.rich.training = True
            try:
                return self.rich(x)
            finally:
                self.rich.training = self.training

    learner = OnePass(Mute(), learning_rate=0.1, loss=lambda outputs, y: outputs.square().mean())
    x, y = batch()
    learner.observe(x, y)
    for ask in (learner.predict, learner.scores):
        with refused(learner, "refused the batch", f"no {trouble}"):
            ask(x)


def test_a_shape_that_torch_refuses_by_an_assertion_is_one_sentence() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    learner = OnePass(
        nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), "van", learning_rate=0.1, loss=lambda o, y: (o - y).square().mean()
    )
    x = torch.randn(4, 3, 7)
    with refused(learner, "refused the batch"):
        learner.observe(x, x)


def test_the_mode_of_a_module_in_evaluation_is_not_changed_by_a_refused_batch() -> None:
    learner = in_a_second_task()
    learner.module.eval()
    with refused(learner, "refused the batch"):
        learner.observe(*batch(1))


@pytest.mark.parametrize("method", ["a-gem", "s-gem", "gem"])
def test_a_refused_step_counts_no_violation(method: str) -> None:
    # One parameter, so the infinite slope has one sign, and its product with the gradient on the memory is minus infinity.
    steep: list[bool] = []

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return -(outputs - outputs.detach()).sum().sqrt() if steep and steep.pop() else (outputs * y).mean()

    one = torch.ones(4, 1)
    learner = OnePass(nn.Linear(1, 1, bias=False), method, learning_rate=0.1, loss=loss)
    learner.observe(one, one)
    learner.end_task()
    learner.observe(one, one)
    steep.append(True)
    with refused(learner, "not finite"):
        learner.observe(one, one)
    assert learner.violations == 0


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Any], tuple[str, ...]]] = {
    "nan": (lambda o, y: (o - y).mean() * torch.nan, ("loss of this batch is nan",)),
    "inf": (lambda o, y: (o - y).square().mean() + torch.inf, ("loss of this batch is inf",)),
    "one a batch row": (lambda o, y: (o - y).square().mean(1), ("one number", "tensor of shape", "mean")),
    "a matrix": (lambda o, y: (o - y).square(), ("one number", "tensor of shape", "mean")),
    "a Python float": (lambda o, y: (o - y).square().mean().item(), ("one number", "float")),
    "nothing": (lambda o, y: None, ("one number", "NoneType")),
    "an array": (lambda o, y: (o - y).square().mean().detach().numpy(), ("one number", "ndarray")),
    "slope at zero": (lambda o, y: (o * 0).sum().sqrt(), ("gradient", "not finite")),
    "wrong arguments": (lambda o: o.mean(), ("refused the batch", "argument")),  # type: ignore[misc]
    "wrong shapes": (lambda o, y: (o[:, :3] - y).mean(), ("refused the batch",)),
    "a missing key": (lambda o, y: o["logits"].mean(), ("refused the batch",)),
    "division": (lambda o, y: o.mean() / 0 if 1 // 0 else o.mean(), ("refused the batch", "zero")),
}


@pytest.mark.parametrize("case", LOSSES)
@pytest.mark.parametrize("method", ["van", "a-gem", "er"])
def test_a_loss_of_ones_own_that_is_no_loss_is_refused(case: str, method: str) -> None:
    loss, words = LOSSES[case]
    bad: list[bool] = []

    def either(*given: Any) -> Any:
        if not bad:
            return (given[0] - given[1]).square().mean()
        return loss(given[0]) if case == "wrong arguments" and len(given) == 1 else loss(*given)  # type: ignore[call-arg]

    learner = in_a_second_task(method, loss=either)
    x, _ = batch(seed=9)
    bad.append(True)
    with refused(learner, *words):
        learner.observe(x, x[:, :CLASSES])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda y: y * torch.nan, ("y has values that are not finite",)),
        (lambda y: y[:-1], ("8 examples", "y has 7")),
        (lambda y: y.double(), ("y is torch.float64", "convert")),
        (lambda y: y[:, :2], ("y has the shape [8, 2]",)),
        (lambda y: None, ("y must be a tensor",)),
    ],
)
def test_bad_targets_of_a_loss_of_ones_own_are_refused(spoil: Callable[[Tensor], Any], words: tuple[str, ...]) -> None:
    learner = in_a_second_task(loss=nn.functional.mse_loss)
    x, _ = batch(seed=9)
    with refused(learner, *words):
        learner.observe(x, spoil(x[:, :CLASSES]))


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (lambda o: o[:, :1], ("[batch, classes]", "[8, 1]")),
        (lambda o: o[:, :, None], ("[8, 4, 1]",)),
        (lambda o: (o, o), ("tuple",)),
        (lambda o: o[:3], ("[3, 4]",)),
    ],
)
def test_a_module_whose_outputs_are_no_classes_is_refused(outputs: Callable[[Tensor], Any], words: tuple[str, ...]) -> None:
    class Odd(Rich):
        def forward(self, x: Tensor) -> Any:
            return outputs(super().forward(x))

    learner = OnePass(Odd(), learning_rate=0.1)
    with refused(learner, *words):
        learner.observe(*batch())


def test_learning_inside_inference_mode_learns_or_is_refused() -> None:
    learner = in_a_second_task("van", adam=False)
    before = snapshot(learner)
    with torch.inference_mode():
        try:
            learner.observe(*batch(seed=9))
        except InputError:
            assert same(before, snapshot(learner))
            return
    assert not same(before["values"], snapshot(learner)["values"]), "a step was counted, and nothing was learnt"


def test_a_step_that_would_leave_the_numbers_that_there_are_is_refused() -> None:
    module = nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    learner = OnePass(module, "van", optimizer=optimizer)
    x, y = batch()
    learner.observe(x, y)
    optimizer.param_groups[0]["lr"] = 1e38
    with refused(learner, "finite"):
        learner.observe(x * 1000, y)


@pytest.mark.parametrize("method", ["van", "a-gem", "rwalk", "pi"])
def test_an_optimizer_that_fails_halfway_changes_nothing(method: str) -> None:
    class Fragile(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                self.param_groups[0]["params"][0].data.add_(1)
                raise RuntimeError("out of luck")
            return super().step(closure)

    module = Rich()
    optimizer = Fragile([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    learner = OnePass(module, method, optimizer=optimizer)
    for seed in range(3):
        learner.observe(*batch(seed=seed))
    optimizer.fails = True
    with refused(learner, "out of luck"):
        learner.observe(*batch(seed=9))


# ---- the first batch, and the first one of a task

START = ["nan", "gradient", "runtime"]


@pytest.mark.parametrize("method", LIVE)
@pytest.mark.parametrize("trouble", START)
def test_a_first_batch_that_is_refused_leaves_no_trace(method: str, trouble: str) -> None:
    learner = OnePass(Rich(), method, learning_rate=0.1, tasks=[[0, 1], [2, 3]])
    learner.module.make(trouble)  # type: ignore[operator]
    with refused(learner, *TROUBLE[trouble]):
        learner.observe(*batch(classes=range(2)))


@pytest.mark.parametrize("trouble", START)
@pytest.mark.parametrize("method", ["van", "a-gem", "s-gem", "rwalk"])
def test_a_refused_first_batch_of_the_next_task_leaves_no_trace(trouble: str, method: str) -> None:
    learner = in_a_second_task(method)
    learner.end_task()
    learner.module.make(trouble)  # type: ignore[operator]
    with refused(learner, *TROUBLE[trouble]):
        learner.observe(*batch(seed=9))


@pytest.mark.parametrize("trouble", START)
@pytest.mark.parametrize("method", ["van", "a-gem", "gem", "rwalk", "pi"])
def test_a_refused_batch_of_another_task_does_not_end_the_current_one(trouble: str, method: str) -> None:
    learner = in_a_second_task(method)
    learner.module.make(trouble)  # type: ignore[operator]
    with refused(learner, *TROUBLE[trouble]):
        learner.observe(*batch(seed=9), task="another")


def test_a_refused_batch_with_a_new_class_does_not_grow_the_head() -> None:
    learner = in_a_second_task(grow=True)
    x, y = batch(seed=9)
    learner.module.make("nan")  # type: ignore[operator]
    with refused(learner, "nan"):
        learner.observe(x, y + 2)
    learner.module.make(None)  # type: ignore[operator]
    learner.observe(x, y + 2)
    assert learner.outputs == learner.module.head.out_features == CLASSES + 2  # type: ignore[union-attr]


def test_a_refused_first_batch_does_not_grow_the_head_for_its_tasks() -> None:
    learner = OnePass(Rich(), learning_rate=0.1, tasks=[[0, 1], [4, 5]], grow=True)
    learner.module.make("nan")  # type: ignore[operator]
    with refused(learner, "nan"):
        learner.observe(*batch(classes=range(2)))


def test_a_layer_that_cannot_grow_since_it_is_not_the_last_one_is_refused_and_not_spoilt() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body = nn.Linear(5, CLASSES), nn.Linear(FEATURES, 5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(torch.tanh(self.body(x)))
            return out

    learner = OnePass(Backwards(), learning_rate=0.1, grow=True)
    x, y = batch()
    learner.observe(x, y)
    with refused(learner):
        learner.observe(x, y + 3)
    learner.observe(x, y)


# ---- modules that were changed behind our back


def moved(module: Rich) -> None:
    module.to("meta")


def emptied(module: Rich) -> None:
    module.to_empty(device="meta")


def doubled(module: Rich) -> None:
    module.double()


def there_and_back(module: Rich) -> None:
    module.double().float()


def shared(module: Rich) -> None:
    module.body.weight.data = module.body.weight.data.clone()


def recreated(module: Rich) -> None:
    module.body.weight = nn.Parameter(module.body.weight.detach().clone())


def replaced(module: Rich) -> None:
    module.head = nn.Linear(7, CLASSES)


def enlarged(module: Rich) -> None:
    module.head = nn.Linear(7, CLASSES + 2)


def added(module: Rich) -> None:
    module.scale = nn.Parameter(torch.ones(1))


def removed(module: Rich) -> None:
    module.body.bias = None


def frozen(module: Rich) -> None:
    module.body.requires_grad_(False)


def thawed(module: Rich) -> None:
    module.still.requires_grad_(True)


def tied(module: Rich) -> None:
    module.still.bias = module.norm.bias  # type: ignore[assignment]


def assigned(module: Rich) -> None:
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)


TAMPERED: dict[Callable[[Rich], None], tuple[str, ...]] = {
    moved: ("moved from cpu to meta", "move it back"),
    emptied: ("moved from cpu to meta",),
    doubled: ("'still.weight'", "wrap the module anew"),
    there_and_back: ("created anew", "in place"),
    shared: ("'body.weight' was created anew", "in place"),
    recreated: ("'body.weight' was created anew", "in place"),
    replaced: ("'head.weight' was created anew",),
    enlarged: ("'head.weight' was created anew",),
    added: ("'scale' was added", "wrap"),
    removed: ("'body.bias' is gone", "put it back"),
    frozen: ("requires_grad of 'body.weight'", "change it back"),
    thawed: ("requires_grad of 'still.weight'", "change it back"),
    tied: ("",),
    assigned: ("created anew",),
}


@pytest.mark.parametrize("tamper", TAMPERED, ids=lambda f: f.__name__)
def test_a_module_that_was_changed_behind_our_back_is_noticed(tamper: Callable[[Rich], None], tmp_path: Path) -> None:
    learner = in_a_second_task()
    assert isinstance(learner.module, Rich)
    tamper(learner.module)
    x, y = batch(seed=9)
    calls: list[Callable[[], object]] = [
        lambda: learner.observe(x, y),
        learner.end_task,
        lambda: learner.predict(x),
        lambda: learner.scores(x),
        lambda: learner.save(tmp_path / "saved"),
        lambda: learner.export(tmp_path / "exported.pt2"),
    ]
    for call in calls:
        with refused(learner, *TAMPERED[tamper]):
            call()
    assert not list(tmp_path.iterdir())


def test_what_is_put_back_is_as_good_as_before() -> None:
    learner = in_a_second_task()
    module = learner.module
    assert isinstance(module, Rich)
    head = module.head
    replaced(module)
    frozen(module)
    added(module)
    module.head = head
    module.body.requires_grad_(True)
    del module.scale
    learner.observe(*batch(seed=9))
    assert learner.steps == 6


def test_values_that_were_written_in_place_are_taken_as_they_are() -> None:
    learner = in_a_second_task("van", adam=False)
    module = learner.module
    twin = copy.deepcopy(module)
    fresh = Rich().state_dict()
    module.load_state_dict(fresh)
    twin.load_state_dict(fresh)
    assert same(dict(learner.module.state_dict()), dict(fresh))
    x, _ = batch(seed=9)
    assert torch.equal(learner.scores(x), twin.eval()(x))


def test_a_module_that_was_wrapped_again_belongs_to_the_second_wrapper() -> None:
    module = Rich()
    first = OnePass(module, learning_rate=0.1)
    second = OnePass(module, learning_rate=0.1)
    with refused(first, "created anew"):
        first.observe(*batch())
    second.observe(*batch())


# ---- ends of tasks


def test_a_task_ends_once() -> None:
    learner = OnePass(Rich(), learning_rate=0.1)
    with refused(learner, "no batch was observed"):
        learner.end_task()
    learner.observe(*batch())
    learner.end_task()
    with refused(learner, "no batch was observed", "observe some"):
        learner.end_task()


@pytest.mark.parametrize("method", ["ewc", "mas", "icarl"])
def test_methods_that_look_again_say_so(method: str) -> None:
    learner = in_a_second_task(method)
    with refused(learner, "second time", "again=", "moving-average" if method == "ewc" else method):
        learner.end_task()
    with refused(learner, "no data", "again="):
        learner.end_task(again=[])
    if method != "icarl":
        with refused(learner, "again=", "before the next task"):
            learner.observe(*batch(), task="next")


AGAIN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "nan": lambda x, y: [(x, y), (x * torch.nan, y)],
    "shape": lambda x, y: [(x, y), (x[:, :3], y)],
    "labels": lambda x, y: [(x, y), (x, y + 100)],
    "lengths": lambda x, y: [(x, y), (x, y[:3])],
    "no pairs": lambda x, y: [x],
    "threes": lambda x, y: [(x, y, y)],
    "no batches": lambda x, y: 5,
    "one batch": lambda x, y: (x, y),
}


@pytest.mark.parametrize("case", AGAIN)
@pytest.mark.parametrize("method", ["ewc", "mas", "icarl"])
def test_bad_data_to_look_at_again_is_refused(method: str, case: str) -> None:
    learner = in_a_second_task(method)
    x, y = batch(seed=9, classes=range(2, 4))
    with refused(learner):
        learner.end_task(again=AGAIN[case](x, y))
    learner.end_task(again=[(x, y)])
    assert learner.segment == 2


@pytest.mark.parametrize("method", ["ewc", "mas"])
def test_a_second_look_that_leaves_the_numbers_that_there_are_does_not_poison_what_comes(method: str) -> None:
    module = nn.Linear(FEATURES, CLASSES)
    with torch.no_grad():
        module.weight.mul_(1e-3)  # so that outputs, and their loss, are finite where slopes are not
    learner = OnePass(module, method, learning_rate=0.1, **({"labels": "data"} if method == "ewc" else {}))
    x, y = batch()
    learner.observe(x * 1e-3, y)
    with refused(learner):
        learner.end_task(again=[(x * 3e20, y)])
    learner.end_task(again=[(x, y)])
    learner.observe(x, y)


@pytest.mark.parametrize(
    "answer", [lambda out: (out, out), lambda out: {"out": out}, lambda out: out["out"], lambda out: None], ids=["tuple", "dict", "index", "none"]
)
def test_a_module_that_fails_in_the_second_look_is_one_sentence(answer: Callable[[Tensor], Any]) -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Any:
            return self.head(x) if self.training else answer(self.head(x))

    learner = OnePass(Moody(), "mas", learning_rate=0.1, loss=lambda o, y: o.square().mean())
    x, _ = batch()
    learner.observe(x, x)
    with refused(learner):
        learner.end_task(again=[(x, x)])


def test_icarl_with_several_inputs_is_refused_or_works() -> None:
    learner = OnePass(Pair(), "icarl", learning_rate=0.1, tasks=[[0, 1], [2, 3]])
    one, two = batch(classes=range(2)), batch(classes=range(2, 4))
    try:
        for x, y in (one, two):
            learner.observe((x, x[:, :3]), y)
            learner.end_task(again=[((x, x[:, :3]), y)])
        answer = learner.predict((one[0], one[0][:, :3]), task=0)
    except InputError as error:
        check_sentence(error, ("icarl",))
        return
    assert set(answer.tolist()) <= {0, 1}


# ---- memories


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"per_task": 0}, ("per_task", "above 0")),
        ({"per_task": -1}, ("per_task", "-1")),
        ({"per_task": 2.5}, ("per_task", "2.5")),
        ({"per_task": True}, ("per_task", "True")),
        ({"per_task": "many"}, ("per_task", "many")),
        ({"examples": 0}, ("examples", "above 0")),
        ({"bytes": 0}, ("bytes", "above 0")),
        ({"bytes": 1e6}, ("bytes", "whole number")),
        ({"recent": -1}, ("recent", "-1")),
        ({"recent": 0.5}, ("recent", "0.5")),
        ({"policy": "ringg"}, ("unknown memory policy 'ringg'", "did you mean 'ring'")),
        ({"policy": 3}, ("policy", "3")),
        ({"where": "gpu"}, ("place", "'gpu'", "cpu")),
        ({"where": "disk"}, ("folder",)),
        ({"folder": "there"}, ("folder", "disk")),
        ({"where": "cpu", "folder": "there"}, ("folder", "disk")),
    ],
    ids=str,
)
def test_a_memory_with_bad_values_is_refused(plan: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        Memory(**plan)
    check_sentence(caught.value, words)


def test_a_memory_of_too_few_bytes_is_refused_before_anything_is_learnt() -> None:
    learner = OnePass(Rich(), learning_rate=0.1, memory=Memory(bytes=10))
    with refused(learner, "10 bytes", "one example needs"):
        learner.observe(*batch())


def test_a_memory_in_a_folder_that_cannot_be_is_refused_before_anything_is_learnt(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    module = Rich()
    before = copy.deepcopy(module.state_dict())
    plan = Memory(where="disk", folder=tmp_path / "file" / "folder")
    with pytest.raises(InputError) as caught:
        OnePass(module, learning_rate=0.1, memory=plan).observe(*batch())
    check_sentence(caught.value, (str(tmp_path), "folder"))
    assert same(dict(before), dict(module.state_dict()))


def test_a_disk_that_is_full_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = in_a_second_task(memory=Memory(where="disk", folder=tmp_path, per_task=40))
    learner.observe(*batch(seed=5))  # 48 of 48 rows are taken

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        with refused(learner, "No space left", "make room"):
            learner.observe(*batch(seed=6))
    learner.observe(*batch(seed=6))
    assert learner.memory is not None
    assert learner.memory.size == 56


def test_a_place_for_autosaves_that_cannot_be_written_is_refused_before_anything_is_learnt(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError) as caught:
        OnePass(Rich(), learning_rate=0.1, autosave=tmp_path / "file" / "saved").observe(*batch())
    check_sentence(caught.value, ("cannot write", "choose another"))


# ---- wrapping

RATE = {"learning_rate": 0.1}


def mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 5).double(), nn.Linear(5, CLASSES))


def not_finite() -> nn.Module:
    module = small_net(CLASSES)
    with torch.no_grad():
        module[0].weight[0, 0] = torch.nan  # type: ignore[index]
    return module


def complex_numbers() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES).to(torch.complex64)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda: torch.relu, ("nn.Module", "builtin")),
        (lambda: nn.Linear, ("nn.Module", "type")),
        (nn.ReLU, ("no trainable parameters",)),
        (lambda: nn.Linear(3, 2).requires_grad_(False), ("no trainable parameters",)),
        (lambda: nn.Sequential(nn.LazyLinear(5), nn.Linear(5, 2)), ("'0.weight'", "no shape yet", "one batch")),
        (mixed, ("float32", "float64", "convert")),
        (not_finite, ("'0.weight' is not finite", "initialise")),
        (complex_numbers, ("complex", "real")),
        (lambda: nn.Linear(3, 2, device="meta"), ("meta",)),
    ],
)
def test_a_module_that_cannot_learn_is_refused(module: Callable[[], Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        OnePass(module(), learning_rate=0.1)
    check_sentence(caught.value, words)


SETTINGS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("agem", RATE, ("unknown method 'agem'", "did you mean 'a-gem'")),
    ("quantum", RATE, ("unknown method 'quantum'",)),
    ("prog-nn", RATE, ("prog-nn", "network of its own", "choose another")),
    ("multi-task", RATE, ("multi-task", "all tasks at once", "choose another")),
    ("gem", RATE | {"task_free": True}, ("gem needs task boundaries", "a-gem")),
    ("s-gem", RATE | {"task_free": True}, ("task boundaries",)),
    ("ewc", RATE | {"task_free": True}, ("task boundaries",)),
    ("icarl", RATE | {"task_free": True}, ("task boundaries",)),
    ("icarl", RATE, ("classes of each task", "tasks=")),
    ("icarl", RATE | {"tasks": [[0, 1]], "loss": nn.functional.mse_loss}, ("classes of each task",)),
    ("icarl", RATE | {"tasks": [[0, 1], [0, 1]]}, ("icarl", "classes of their own")),
    ("icarl", RATE | {"tasks": [[0, 1], [2, 3]], "exemplars": 3}, ("exemplar", "exemplars=3")),
    ("ewc", RATE | {"loss": nn.functional.mse_loss}, ("ewc", "labels='data'")),
    ("a-gem", {}, ("learning_rate", "optimizer", "one of them")),
    ("a-gem", {"learning_rate": 0}, ("learning rate", "above 0")),
    ("a-gem", {"learning_rate": -0.1}, ("learning rate", "-0.1")),
    ("a-gem", {"learning_rate": float("nan")}, ("learning rate", "nan")),
    ("a-gem", {"learning_rate": float("inf")}, ("learning rate", "inf")),
    ("a-gem", {"learning_rate": "fast"}, ("learning rate", "fast")),
    ("a-gem", {"learning_rate": True}, ("learning rate", "True")),
    ("a-gem", {"learning_rate": 1e39}, ("learning rate",)),
    ("a-gem", RATE | {"reference_bach": 3}, ("'reference_bach'", "did you mean 'reference_batch'")),
    ("a-gem", RATE | {"strength": 3}, ("setting of a-gem 'strength'",)),
    ("a-gem", RATE | {"lr": 3}, ("setting of a-gem 'lr'",)),
    ("a-gem", RATE | {"reference_batch": 0}, ("reference_batch", "at least 1")),
    ("er", RATE | {"reference_batch": 0}, ("reference_batch", "at least 1")),
    ("a-gem", RATE | {"reference_batch": -3}, ("reference_batch", "-3")),
    ("a-gem", RATE | {"reference_batch": 2.5}, ("reference_batch", "2.5")),
    ("a-gem", RATE | {"reference_batch": "all"}, ("reference_batch", "all")),
    ("a-gem", RATE | {"reference_batch": True}, ("reference_batch", "True")),
    ("a-gem", RATE | {"reference_moves_buffers": 1}, ("reference_moves_buffers", "1")),
    ("ewc", RATE | {"strength": -1}, ("strength", "-1")),
    ("ewc", RATE | {"strength": float("nan")}, ("strength", "nan")),
    ("ewc", RATE | {"strength": "strong"}, ("strength", "strong")),
    ("ewc", RATE | {"fisher": "moving average"}, ("fisher", "moving average", "moving-average")),
    ("ewc", RATE | {"labels": "modell"}, ("labels", "modell", "model")),
    ("ewc", RATE | {"fisher": 3}, ("fisher", "3")),
    ("ewc", RATE | {"fisher": "moving-average", "fisher_every": 0}, ("fisher_every",)),
    ("rwalk", RATE | {"fisher_every": 0}, ("fisher_every",)),
    ("pi", RATE | {"damping": 0.0}, ("damping", "above 0")),
    ("pi", RATE | {"damping": float("nan")}, ("damping",)),
    ("rwalk", RATE | {"damping": float("inf")}, ("damping",)),
    ("gem", RATE | {"ridge": float("nan")}, ("ridge",)),
    ("gem", RATE | {"margin": -0.5}, ("margin", "-0.5")),
    ("a-gem", RATE | {"loss": "mse"}, ("unknown loss 'mse'", "cross-entropy")),
    ("a-gem", RATE | {"loss": None}, ("loss",)),
    ("a-gem", RATE | {"loss": 3}, ("loss",)),
    ("a-gem", RATE | {"precision": "bf16"}, ("unknown precision 'bf16'", "bfloat16")),
    ("a-gem", RATE | {"precision": "float16"}, ("unknown precision", "bfloat16")),
    ("a-gem", RATE | {"precision": None}, ("precision",)),
    ("a-gem", RATE | {"precision": torch.bfloat16}, ("precision",)),
    ("a-gem", RATE | {"tasks": []}, ("tasks", "classes of each task")),
    ("a-gem", RATE | {"tasks": [[]]}, ("tasks",)),
    ("a-gem", RATE | {"tasks": [[0, 0]]}, ("tasks", "each once")),
    ("a-gem", RATE | {"tasks": [[-1, 0]]}, ("tasks", "from 0")),
    ("a-gem", RATE | {"tasks": [[0, 1], [1, 2]]}, ("overlap",)),
    ("a-gem", RATE | {"tasks": [0, 1]}, ("tasks",)),
    ("a-gem", RATE | {"tasks": 2}, ("tasks",)),
    ("a-gem", RATE | {"tasks": [["cat", "dog"]]}, ("tasks",)),
    ("a-gem", RATE | {"tasks": [[0.5, 1]]}, ("tasks",)),
    ("a-gem", RATE | {"tasks": {1.5: [0, 1]}}, ("task",)),
    ("a-gem", RATE | {"tasks": [[0, 1]], "task_free": True}, ("task-free", "not both")),
    ("a-gem", RATE | {"grow": "fc"}, ("'fc'", "choose one of 0, 2")),
    ("a-gem", RATE | {"grow": "1"}, ("'1'",)),
    ("a-gem", RATE | {"grow": True, "loss": nn.functional.mse_loss}, ("classes", "grow")),
    ("a-gem", RATE | {"memory": Memory(policy="ring"), "loss": nn.functional.mse_loss}, ("ring", "reservoir")),
    ("a-gem", RATE | {"memory": Memory(policy="ring"), "task_free": True}, ("ring", "task-free")),
    ("a-gem", RATE | {"memory": 100}, ("memory",)),
    ("a-gem", RATE | {"memory": {"per_task": 3}}, ("memory",)),
    ("a-gem", RATE | {"seed": "zero"}, ("seed",)),
    ("a-gem", RATE | {"seed": None}, ("seed",)),
    ("a-gem", RATE | {"seed": 1.5}, ("seed",)),
    ("a-gem", RATE | {"seed": 2**70}, ("seed",)),
    ("a-gem", RATE | {"watch": 5}, ("watch",)),
    ("a-gem", RATE | {"watch": [print, 5]}, ("watch", "int")),
    ("a-gem", RATE | {"watch_every": 0}, ("watch_every", "above 0")),
    ("a-gem", RATE | {"watch_every": 1.5}, ("watch_every", "1.5")),
    ("a-gem", RATE | {"autosave": 5}, ("autosave",)),
    ("a-gem", RATE | {"autosave_every": 0}, ("autosave_every", "above 0")),
    ("a-gem", {"optimizer": "adam"}, ("optimizer", "str")),
]


@pytest.mark.parametrize(("method", "settings", "words"), SETTINGS, ids=[f"{method} {' '.join(given)}" for method, given, _ in SETTINGS])
def test_settings_that_make_no_sense_are_refused(method: str, settings: dict[str, Any], words: tuple[str, ...]) -> None:
    module = small_net(CLASSES)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - what it says is looked at below
        OnePass(module, method, **settings)
    check_sentence(caught.value, words)
    assert same(dict(before), dict(module.state_dict()))
    assert all(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("method", [3, None, ["a-gem"]])
def test_a_method_that_is_no_name_is_refused(method: Any) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        OnePass(small_net(), method, learning_rate=0.1)
    check_sentence(caught.value, ("method",))


def test_optimizers_that_cannot_drive_the_module_are_refused() -> None:
    module, other = small_net(), small_net()
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"optimizer": torch.optim.SGD(other.parameters(), lr=0.1)}, ("not the module's", "module.parameters()")),
        ({"optimizer": torch.optim.LBFGS(module.parameters())}, ("LBFGS", "several times", "choose another")),
        ({"optimizer": torch.optim.SGD(module.parameters(), lr=0.1), "learning_rate": 0.1}, ("one of them",)),
    ]
    for settings, words in cases:
        with pytest.raises(InputError) as caught:
            OnePass(module, **settings)
        check_sentence(caught.value, words)


def test_a_layer_that_cannot_grow_is_refused() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    parametrised = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    still = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    convolution = nn.Sequential(nn.Conv2d(1, 1, 1))
    for module, word in ((tied, "untie"), (parametrised, "parametrised"), (still, "frozen"), (convolution, "no nn.Linear")):
        with pytest.raises(InputError) as caught:
            OnePass(module, learning_rate=0.1, grow=True)
        check_sentence(caught.value, (word,))


@pytest.mark.parametrize(
    ("method", "settings"),
    [("pi", {"damping": 0.0}), ("icarl", {"tasks": [[0, 1], [0, 1]]}), ("a-gem", {"watch": [5]}), ("a-gem", {"grow": "fc"}), ("nothing", {})],
)
def test_a_wrapper_that_could_not_be_made_leaves_the_one_there_is_alone(method: str, settings: dict[str, Any]) -> None:
    module = small_net(CLASSES)
    learner = OnePass(module, learning_rate=0.1)
    learner.observe(*batch())
    with pytest.raises(InputError):
        OnePass(module, method, learning_rate=0.1, **settings)
    learner.observe(*batch(seed=1))
    assert learner.steps == 2


def test_what_is_not_there_yet_cannot_be_exported(tmp_path: Path) -> None:
    learner = OnePass(small_net(), learning_rate=0.1)
    with refused(learner, "nothing to export", "observe a batch"):
        learner.export(tmp_path / "early.pt2")
    assert not list(tmp_path.iterdir())


def test_icarl_has_no_answer_before_its_first_task_has_ended() -> None:
    learner = OnePass(Rich(), "icarl", learning_rate=0.1, tasks=[[0, 1], [2, 3]])
    x, y = batch(classes=range(2))
    learner.observe(x, y)
    with refused(learner, "no answer", "end_task()"):
        learner.predict(x, task=0)
