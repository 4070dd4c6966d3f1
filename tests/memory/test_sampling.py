"""The core of sampling is the same on the host and on the device."""

from __future__ import annotations

import pytest
import torch

from onepass.memory.sampling import ExampleNumbers, ReferencePlaces, place_in_reservoir, share
from onepass.random_numbers import Purpose


def test_the_host_and_the_device_choose_the_same_places() -> None:
    numbers = torch.arange(3000)
    uniform = ExampleNumbers([7, 8], Purpose.RESERVOIR, 3).at(numbers.expand(2, -1))
    chosen = place_in_reservoir(uniform, numbers)
    alone = ExampleNumbers([8], Purpose.RESERVOIR, 3)
    assert [alone[n] for n in range(3000)] == uniform[1].tolist()
    assert [place_in_reservoir(alone[n], n) for n in range(3000)] == chosen[1].tolist()
    assert bool((chosen >= 0).all() and (chosen <= numbers).all())


def test_numbers_of_one_run_may_be_read_in_any_order() -> None:
    numbers = ExampleNumbers([5], Purpose.HELD_OUT, 0)
    backwards = [numbers[n] for n in reversed(range(0, 2000, 7))]
    assert backwards[::-1] == [numbers[n] for n in range(0, 2000, 7)]


@pytest.mark.parametrize(("groups", "room"), [(1, 5), (3, 11), (7, 3), (4, 8)])
def test_shares_are_even_and_use_all_the_room(groups: int, room: int) -> None:
    shares = [share(place, groups, room) for place in range(groups)]
    assert sum(shares) == room
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


def test_places_made_ahead_are_those_of_each_step() -> None:
    places, step = ReferencePlaces([3, 4]), torch.tensor([10, 12])
    ahead = places.distinct_ahead(step, 20, [50, 60], 5, 4)
    several = places.independent(step, torch.tensor([[50], [60]]), 5, 4)
    for n in range(4):
        one = ReferencePlaces([3, 4])
        assert torch.equal(ahead[:, n], one.distinct(step + n, None, [50, 60], 5))
        assert torch.equal(ahead[:, n], one.distinct(step + n, 20 + n, [50, 60], 5))
        alone = one.independent(step + n, torch.tensor([[50], [60]]), 5)
        assert torch.equal(several[:, n], alone[:, 0])
