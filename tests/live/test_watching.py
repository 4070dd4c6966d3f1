"""What a report says is true, and watching changes nothing in what is learnt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onepass import InputError, LearntError, Memory, OnePass
from onepass.live.saving import packed
from tests.live.modules import LIVE, gradient
from tests.live.reports import CLASSES, KEYS, Report, remembered, right, stream
from tests.toys import FEATURES, Dropped, Normed, small_net


def test_reports_come_every_so_many_batches_to_everybody() -> None:
    one: list[Report] = []
    other: list[Report] = []
    watches = [one.append, other.append]
    learner = OnePass(small_net(CLASSES), learning_rate=0.1, watch=watches, watch_every=4)
    for x, y in stream(11):
        learner.observe(x, y)
    assert [report["step"] for report in one] == [4, 8]
    assert one == other
    for report in [*one, learner.report(), OnePass(small_net(), "van", learning_rate=0.1).report()]:
        assert list(report) == KEYS


def test_a_report_of_nothing_says_nothing() -> None:
    report = OnePass(small_net(), learning_rate=0.1).report()
    empty = dict.fromkeys(KEYS) | {"forgetting_by_task": {}, "memory": {}}
    empty |= {"step": 0, "task": 0, "violations": 0, "memory_bytes": 0}
    assert report == empty
    assert OnePass(small_net(), "van", learning_rate=0.1).report() == empty | {"violations": None}


@pytest.mark.parametrize("method", ["van", "a-gem", "pi"])
@pytest.mark.parametrize("build", [Normed, small_net, Dropped], ids=lambda b: b.__name__)
def test_loss_and_accuracy_are_those_before_learning(
    build: Callable[[], nn.Module], method: str
) -> None:
    module = build()
    reports: list[Report] = []
    learner = OnePass(module, method, learning_rate=0.1, watch=reports.append, watch_every=3)
    losses, shares, counts = [], [], []
    for (x, y), n in zip(stream(9), [8, 3, 8, 5, 8, 8, 2, 8, 7], strict=True):
        shares.append(right(module, x[:n], y[:n]) * n)
        losses.append(learner.observe(x[:n], y[:n]))
        counts.append(n)
    for k, report in enumerate(reports):
        part = slice(3 * k, 3 * k + 3)
        assert report["loss"] == pytest.approx(sum(losses[part]) / 3)
        assert report["accuracy"] == pytest.approx(sum(shares[part]) / sum(counts[part]))
    assert len(reports) == 3
    assert reports[-1]["accuracy"] > 0


def test_the_accuracy_of_a_task_with_a_head_is_that_among_its_classes() -> None:
    module = small_net(CLASSES)
    with torch.no_grad():
        module[2].bias[:2] += 10  # type: ignore[index]
    reports: list[Report] = []
    watch: dict[str, Any] = {"watch": reports.append, "watch_every": 1}
    learner = OnePass(module, learning_rate=0.1, tasks=[[0, 1], [2, 3]], **watch)
    for x, y in stream(5, classes=range(2, 4)):
        expected = right(nn.Sequential(copy.deepcopy(module), nn.ZeroPad1d((-2, 0))), x, y - 2)
        learner.observe(x, y, task=1)
        assert reports[-1]["accuracy"] == pytest.approx(expected)
    assert any(report["accuracy"] > 0 for report in reports)


def watched(module: nn.Module, method: str, reports: list[Report], every: int = 1) -> OnePass:
    memory = Memory(per_task=20)
    watch: dict[str, Any] = {"watch": reports.append, "watch_every": every}
    return OnePass(module, method, learning_rate=0.1, memory=memory, **watch)


def cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.cosine_similarity(one, other, dim=0))


@pytest.mark.parametrize("method", ["a-gem", "mega-1", "mega-2", "s-gem"])
def test_the_cosine_is_that_between_gradient_and_reference_gradient(method: str) -> None:
    module = small_net(CLASSES)
    reports: list[Report] = []
    learner = watched(module, method, reports)
    for x, y in stream():
        learner.observe(x, y)
    assert all(report["cosine"] is None for report in reports)
    learner.end_task()
    for x, y in stream(6, seed=1):
        past = gradient(module, *remembered(learner, 0))
        expected = cosine(gradient(module, x, 3 - y), past)
        learner.observe(x, 3 - y)
        assert reports[-1]["cosine"] == pytest.approx(expected, abs=1e-4)
    assert min(report["cosine"] for report in reports[6:]) < 0


def test_the_cosine_is_the_smallest_where_there_are_several() -> None:
    module = small_net(CLASSES)
    reports: list[Report] = []
    learner = watched(module, "gem", reports)
    for task in range(3):
        for x, y in stream(4, seed=task):
            y = (y + task) % CLASSES
            past = [gradient(module, *remembered(learner, k)) for k in range(task)]
            found = [cosine(gradient(module, x, y), g) for g in past]
            expected = pytest.approx(min(found), abs=1e-4) if found else None
            learner.observe(x, y)
            assert reports[-1]["cosine"] == expected
        learner.end_task()


def test_every_report_has_the_cosine_of_its_own_step() -> None:
    module = small_net(CLASSES)
    reports: list[Report] = []
    learner = watched(module, "a-gem", reports, every=5)
    for x, y in stream(7):
        learner.observe(x, y)
    learner.end_task()
    expected = {}
    for x, y in stream(8, seed=1):
        g, reference = gradient(module, x, y), gradient(module, *remembered(learner, 0))
        learner.observe(x, y)
        expected[learner.steps] = cosine(g, reference)
    first, *later = [report["cosine"] for report in reports]
    assert first is None
    assert later == pytest.approx([expected[10], expected[15]], abs=1e-4)


def test_a_loaded_learner_reports_as_the_saved_one_would_have(tmp_path: Path) -> None:
    module = small_net(CLASSES)
    here: list[Report] = []
    there: list[Report] = []
    learner = OnePass(module, learning_rate=0.1, watch=here.append, watch_every=5)
    for x, y in stream(7):
        learner.observe(x, y)
    learner.end_task()
    for x, y in stream(2, seed=1):
        learner.observe(x, y)
    learner.save(tmp_path / "saved")
    loaded = OnePass.load(tmp_path / "saved", small_net(CLASSES), watch=there.append, watch_every=5)
    x, y = stream(1, seed=2)[0]
    learner.observe(x, y)
    loaded.observe(x, y)
    for key in ("step", "task", "forgetting", "violations", "cosine", "memory"):
        assert there[-1][key] == here[-1][key]


def test_the_memory_is_counted_by_task() -> None:
    learner = OnePass(small_net(CLASSES), learning_rate=0.1, memory=Memory(per_task=12))
    for task, batches in enumerate((1, 3, 2)):
        for x, y in stream(batches, seed=task):
            learner.observe(x, y)
        learner.end_task()
    report = learner.report()
    assert learner.memory is not None
    assert report["memory"] == {0: 8, 1: 12, 2: 12}
    assert report["memory_bytes"] == learner.memory.nbytes >= 32 * (FEATURES * 4 + 8)


@pytest.mark.parametrize("policy", ["class-balanced", "reservoir"])
def test_without_tasks_the_memory_is_counted_by_class(policy: Any) -> None:
    memory = Memory(examples=1000, policy=policy)
    learner = OnePass(small_net(CLASSES), learning_rate=0.1, task_free=True, memory=memory)
    data = stream()
    for x, y in data:
        learner.observe(x, y)
    labels = torch.cat([y for _, y in data])
    assert learner.report()["memory"] == {c: int((labels == c).sum()) for c in range(CLASSES)}


def test_violations_are_those_of_the_learner() -> None:
    reports: list[Report] = []
    learner = OnePass(small_net(CLASSES), learning_rate=0.3, watch=reports.append, watch_every=1)
    for x, y in stream(20):
        learner.observe(x, y)
    learner.end_task()
    for x, y in stream(20, seed=1):
        learner.observe(x, 3 - y)
    assert all(report["violations"] == 0 for report in reports[:20])
    conflicts = sum(report["cosine"] < 0 for report in reports[20:])
    assert conflicts == learner.violations == reports[-1]["violations"] > 0


def test_a_refused_batch_does_not_change_the_report() -> None:
    learner = OnePass(Normed(), learning_rate=0.1, watch=lambda _: None, watch_every=1)
    for x, y in stream():
        learner.observe(x, y)
    learner.end_task()
    for x, y in stream(seed=1):
        learner.observe(x, y)

    def spoil(module: nn.Module, _: object, outputs: Tensor) -> Tensor:
        return outputs * torch.nan if module.training else outputs

    learner.module.get_submodule("fc").register_forward_hook(spoil)
    before = learner.report()
    assert before["cosine"] is not None
    with pytest.raises(InputError):
        learner.observe(x, y)
    assert learner.report() == before


def test_a_module_that_fails_on_the_memory_is_one_sentence_and_the_task_goes_on() -> None:
    class Picky(nn.Linear):
        picky = False

        def forward(self, x: Tensor) -> Tensor:
            if self.picky and not self.training:
                raise LookupError("of my own")
            return super().forward(x)

    module = Picky(FEATURES, CLASSES)
    learner = OnePass(module, "er", learning_rate=0.1, memory=Memory(held_out=5))
    for x, y in stream():
        learner.observe(x, y)
    before, module.picky = packed(learner), True
    says = r"^the module or the loss refused examples of the memory \(of my own\)"
    with pytest.raises(InputError, match=says):
        learner.end_task()
    assert packed(learner) == before
    module.picky = False
    learner.end_task()
    module.picky = True
    with pytest.raises(InputError, match=says):
        learner.report()


def test_an_error_of_a_watch_says_that_the_batch_was_learnt() -> None:
    def careless(_: Report) -> None:
        raise LookupError("of my own")

    learner = OnePass(small_net(CLASSES), learning_rate=0.1, watch=careless, watch_every=2)
    x, y = stream()[0]
    learner.observe(x, y)
    says = r"^the batch was learnt, and then something failed \(of my own\): "
    with pytest.raises(LearntError, match=says) as caught:
        learner.observe(x, y)
    assert isinstance(caught.value.__cause__, LookupError)
    assert not isinstance(caught.value, InputError)
    learner.observe(x, y)
    assert (learner.steps, learner.batches) == (3, 3)
    assert learner.memory is not None
    assert learner.memory.size == 24


# ---- watching changes nothing


@pytest.mark.parametrize("method", LIVE)
@pytest.mark.parametrize("build", [Normed, Dropped, small_net], ids=lambda b: b.__name__)
def test_watching_changes_nothing_in_what_is_learnt(
    build: Callable[[], nn.Module], method: str
) -> None:
    seen, alone = build(), build()
    alone.load_state_dict(seen.state_dict())
    reports: list[Report] = []
    tasks = {"tasks": [[0, 1], range(2, 8)]} if method == "icarl" else {}
    watch: dict[str, Any] = {"watch": reports.append, "watch_every": 2}
    learner = OnePass(seen, method, learning_rate=0.1, **watch, **tasks)
    other = OnePass(alone, method, learning_rate=0.1, **tasks)
    rng_state = torch.get_rng_state()
    for task in range(2):
        data = stream(5, seed=task, classes=range(2 * task, 2 * task + 2))
        for x, y in data:
            assert learner.observe(x, y) == other.observe(x, y)
            learner.report()
        for one in (learner, other):
            one.end_task(again=data if one.learner.needs.second_pass else None)
    assert torch.equal(rng_state, torch.get_rng_state())
    assert len(reports) == 5
    mine, its = seen.state_dict(), alone.state_dict()
    assert all(torch.equal(mine[name], its[name]) for name in mine)
    assert learner.violations == other.violations


# ---- TensorBoard and the live view
