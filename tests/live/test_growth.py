"""New classes enlarge the head in the middle of a stream: what was there stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from onepass import InputError, Memory, OnePass
from onepass.live.growth import enlarge
from onepass.live.saving import packed
from onepass.random_numbers import Purpose, RandomNumbers
from tests.live.growing import SETTINGS, batch, learn, learner_of
from tests.live.saved_learners import net
from tests.toys import FEATURES, Tied


def head_of(learner: OnePass) -> nn.Linear:
    assert learner.head is not None
    head = learner.module.get_submodule(learner.head)
    assert isinstance(head, nn.Linear)
    return head


# ---- the module


def test_growth_keeps_old_outputs_and_initialises_new_ones_as_torch_does() -> None:
    learner = learner_of(seed=6)
    learn(learner)
    before = {name: p.detach().clone() for name, p in learner.module.named_parameters()}
    objects = dict(learner.module.named_parameters())
    random = torch.get_rng_state()
    enlarge(learner, 5)
    assert torch.equal(torch.get_rng_state(), random), "torch's own generator is left alone"
    after = dict(learner.module.named_parameters())
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in after.values())
    assert all(
        (after[name] is parameter) == name.startswith("0.") for name, parameter in objects.items()
    )
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert torch.equal(after["2.weight"][:2], before["2.weight"])
    assert torch.equal(after["2.bias"][:2], before["2.bias"])
    torch.manual_seed(int(RandomNumbers([6], Purpose.INITIAL).bits(1, 1)))
    expected = nn.Linear(5, 5)
    assert torch.equal(after["2.weight"][2:], expected.weight[2:])
    assert torch.equal(after["2.bias"][2:], expected.bias[2:])
    assert head_of(learner).out_features == learner.outputs == 5
    assert learner.module(torch.zeros(3, FEATURES)).shape == (3, 5)
    learner.fleet.intact()


def test_new_outputs_depend_on_the_seed_and_on_how_often_the_head_has_grown_alone() -> None:
    def rows(seed: int) -> Tensor:
        torch.manual_seed(torch.seed() % 1000)
        learner = learner_of(seed=seed)
        learner.observe(*batch(0))
        for outputs in (4, 6):
            enlarge(learner, outputs)
        return head_of(learner).weight.detach()[2:].clone()

    one, again, other = rows(1), rows(1), rows(2)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert len(one.unique(dim=0)) == 4


@pytest.mark.parametrize(
    "head",
    [nn.Linear(5, 2), nn.Linear(5, 2, bias=False), nn.Linear(5, 2, dtype=torch.float64)],
    ids=["plain", "no bias", "float64"],
)
def test_heads_of_every_kind_grow_and_learn(head: nn.Linear) -> None:
    kind = head.weight.dtype
    module = nn.Sequential(nn.Linear(FEATURES, 5, dtype=kind), nn.Tanh(), head)
    learner = learner_of(module=module)
    for classes in (2, 3, 7):
        x, y = batch(classes, classes)
        before = head.weight.detach().clone()
        learner.observe(x.to(kind), y)
        assert head.weight.shape == (classes, 5)
        assert head.weight.dtype == kind
        assert not torch.equal(head.weight[: len(before)], before), "old outputs go on learning"
    assert learner.predict(batch(0)[0].to(kind)).max() < 7


def test_after_growth_all_outputs_compete() -> None:
    learner = learner_of("van")
    learner.observe(*batch(0))
    enlarge(learner, 4)
    x, y = batch(1, 4)
    expected = float(functional.cross_entropy(learner.module(x).detach(), y))
    assert learner.observe(x, y) == pytest.approx(expected, rel=1e-6)
    assert learner.scores(x).shape == (8, 4)


def test_a_label_far_above_the_others_makes_room_for_all_below_it() -> None:
    learner = learner_of()
    learner.observe(*batch(0))
    learner.observe(batch(0)[0], torch.tensor([0, 11, 0, 1, 1, 0, 1, 0]))
    assert learner.outputs == head_of(learner).out_features == 12


def test_a_class_that_appears_is_learnt() -> None:
    learner = learner_of("mega-1")
    for classes in (2, 3, 4):
        for number in range(100):
            learner.observe(*batch(1000 * classes + number, classes))
        learner.end_task()
    x, y = batch(7, 4, 200)
    answers = learner.predict(x)
    assert (answers == y).float().mean() > 0.5  # chance is a quarter
    assert (answers[y == 3] == 3).float().mean() > 0.5


def test_the_head_grows_without_task_boundaries_too() -> None:
    learner = learner_of("er", task_free=True, memory=Memory(examples=20, recent=1))
    for number in range(12):
        learner.observe(*batch(number, 2 + number // 2))
    assert learner.outputs == 7
    assert learner.memory is not None
    assert set(learner.memory.counts()) == set(range(7))


class Two(nn.Module):
    """A head that is not the last linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 2)
        self.body = nn.Linear(FEATURES, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out


def test_the_head_is_the_last_linear_layer_or_the_one_of_that_name() -> None:
    assert learner_of().head == "2"
    assert learner_of(module=nn.Sequential(net(2))).head == "0.2"
    module = Two()
    learner = learner_of("mega-1", module, grow="head")
    for classes in (2, 3, 5):
        learn(learner, 1, classes, classes)
    assert module.head.weight.shape == (5, 5)
    assert module.body.weight.shape == (5, FEATURES)


@pytest.mark.parametrize("grow", [True, "body"])
def test_a_layer_whose_outputs_are_not_the_classes_is_refused_and_stays_as_it_is(
    grow: bool | str,
) -> None:
    module = Two()
    with pytest.raises(InputError, match=r"grow|head|outputs"):  # noqa: PT012 - at once, or when it would have to grow
        learner = learner_of(module=module, grow=grow)
        learner.observe(*batch(0))
        learner.observe(*batch(1, 3))
    assert module.body.weight.shape == (5, FEATURES)
    assert module.head.weight.shape == (2, 5)


# ---- what is refused


class Shared(nn.Module):
    """A head that is also an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(4, FEATURES), nn.Linear(FEATURES, 4, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out


def frozen() -> nn.Module:
    module = net(2)
    module[2].bias.requires_grad_(False)
    return module


def parametrised() -> nn.Module:
    module = net(2)
    parametrizations.weight_norm(module[2])
    return module


@pytest.mark.parametrize(
    ("module", "grow", "words"),
    [
        (Shared(), True, "shares its weights"),
        (Tied(), "second", "shares its weights"),
        (frozen(), True, "frozen"),
        (parametrised(), True, "parametrised"),
        (nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten()), True, "no nn.Linear layer"),
        (net(2), "hed", "no nn.Linear layer 'hed' to grow: choose one of 0, 2"),
        (net(2), "1", "no nn.Linear layer '1'"),
    ],
    ids=["tied", "tied too", "frozen", "parametrised", "none", "unknown", "not linear"],
)
def test_a_head_that_cannot_grow_is_refused_before_anything_happens(
    module: nn.Module, grow: bool | str, words: str
) -> None:
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(InputError) as caught:
        learner_of(module=module, grow=grow)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_loss_of_ones_own_has_no_classes_to_grow_by() -> None:
    with pytest.raises(InputError, match="only classes can grow the head"):
        learner_of(loss=lambda outputs, y: outputs.mean())


@pytest.mark.parametrize(("grow", "label"), [(False, 2), (False, 9), (True, 20_000), (True, -1)])
def test_labels_that_are_out_of_range_are_refused_and_change_nothing(
    grow: bool, label: int
) -> None:
    learner = learner_of(grow=grow)
    learn(learner)
    before = packed(learner)
    x, y = batch(99)
    y[3] = label
    with pytest.raises(InputError, match=f"label {label} is out of range"):
        learner.observe(x, y)
    assert packed(learner) == before


def test_a_first_batch_with_a_label_out_of_range_changes_nothing() -> None:
    learner = learner_of(grow=False)
    before = {name: value.clone() for name, value in learner.module.state_dict().items()}
    with pytest.raises(InputError, match="label 2 is out of range: the module has 2 outputs"):
        learner.observe(*batch(0, 3))
    after = learner.module.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert learner.steps == 0
    learner.observe(*batch(0))


# ER joins the example with others.
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "er"])
def test_a_batch_that_the_module_refuses_does_not_grow_the_head(name: str) -> None:
    module = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    learner = learner_of(name, module)
    learn(learner)
    before = packed(learner)
    with pytest.raises(InputError, match="nothing was learnt"):
        learner.observe(torch.randn(1, FEATURES), torch.tensor([4]))  # one example has no variance
    assert module[2].weight.shape == (2, 5)
    assert packed(learner) == before
    learner.observe(*batch(3, 5))
    assert learner.outputs == 5


def test_outputs_that_somebody_holds_on_to_do_not_keep_the_head_from_growing() -> None:
    learner = learner_of()
    learner.observe(*batch(0))
    held = learner.module(batch(1)[0])
    learner.observe(*batch(2, 3))
    assert learner.outputs == 3
    assert held.shape == (8, 2)
