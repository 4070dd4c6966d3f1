"""Random numbers: functions of seed, purpose, step and index, with the right distribution."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from scipy import stats

from onepass.random_numbers import Purpose, RandomNumbers, uniform_at


def test_a_draw_depends_on_seed_purpose_step_and_index_and_on_nothing_else() -> None:
    source, steps = RandomNumbers([3, 4, 5], Purpose.ORDER), torch.tensor([7, 8, 9])
    many = source.bits(steps, 20)
    assert torch.equal(many[1], RandomNumbers([4], Purpose.ORDER).bits(8, 20)[0])
    assert torch.equal(many[:, :5], source.bits(steps, 5))
    assert not torch.equal(many[1], RandomNumbers([4], Purpose.REFERENCE).bits(8, 20)[0])
    assert len(set(many.flatten().tolist())) == 60


def test_draws_leave_torchs_own_generator_alone() -> None:
    before = torch.get_rng_state()
    RandomNumbers([1], Purpose.REFERENCE).sample(0, [1000], 10)
    assert torch.equal(before, torch.get_rng_state())


STANDING_STILL = """
import gc, sys, threading, time, torch
from onepass.random_numbers import torch_seeded

# Python collects it while torch makes the object of a state, and runs another thread.
class Garbage:
    def __init__(self): self.me = self
    def __del__(self): sum(range(50))

def seed():
    while time.monotonic() < end:
        Garbage()
        with torch_seeded(1, torch.device("cpu")): pass

gc.set_threshold(50)
sys.setswitchinterval(1e-5)
end = time.monotonic() + 3
threads = [threading.Thread(target=seed) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def test_threads_that_seed_torch_do_not_stand_still() -> None:
    subprocess.run([sys.executable, "-c", STANDING_STILL], check=True, timeout=60)


def test_known_values_stay_what_they_are() -> None:
    """Computed once with unlimited integers. If they change, old results cannot be repeated."""
    known = [[4720248854425330031, 1629287585893752162], [7982734928498899980, 7851527857629710090]]
    assert RandomNumbers([0, 1], Purpose.ORDER).bits(0, 2).tolist() == known


def test_uniform_numbers_are_uniform() -> None:
    values = RandomNumbers(range(10), Purpose.ORDER).uniform(5, 10_000).flatten()
    assert values.min() >= 0
    assert values.max() < 1
    assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-3
    following = stats.pearsonr(values[:-1].numpy(), values[1:].numpy())
    assert abs(following.statistic) < 0.02


def test_numbers_can_be_had_by_place() -> None:
    source = RandomNumbers([5, 6], Purpose.RESERVOIR)
    everything = source.uniform(3, 50)
    places = torch.tensor([[4, 49], [0, 7]])
    assert torch.equal(uniform_at(source.key(3), places), everything.gather(1, places))


def test_permutations_of_short_rows_come_first_and_are_complete() -> None:
    order = RandomNumbers([1, 2], Purpose.ORDER).permutation(0, [5, 9])
    assert sorted(order[0, :5].tolist()) == list(range(5))
    assert sorted(order[1].tolist()) == list(range(9))


@pytest.mark.parametrize(("population", "count"), [(40, 12), (12, 12), (500, 12), (100_000, 256)])
def test_samples_are_distinct_members_of_the_population(population: int, count: int) -> None:
    source = RandomNumbers(range(50), Purpose.REFERENCE)
    drawn = source.sample(torch.arange(50), [population] * 50, count)
    assert drawn.shape == (50, count)
    assert drawn.min() >= 0
    assert drawn.max() < population
    assert all(len(set(row)) == count for row in drawn.tolist())


# The first population is permuted, the second one drawn from with rejection.
@pytest.mark.parametrize(("population", "count"), [(20, 6), (60, 6)])
def test_every_member_and_every_pair_is_equally_likely_in_a_sample(
    population: int, count: int
) -> None:
    rows = 20_000
    source = RandomNumbers([7] * rows, Purpose.REFERENCE)
    drawn = source.sample(torch.arange(rows), [population] * rows, count)
    members = torch.bincount(drawn.flatten(), minlength=population)
    assert stats.chisquare(members.numpy()).pvalue > 1e-3
    pairs = torch.bincount(drawn[:, 0] * population + drawn[:, 1], minlength=population**2)
    first_two = pairs.view(population, population)
    off_diagonal = first_two[~torch.eye(population, dtype=torch.bool)]
    assert first_two.diagonal().sum() == 0
    assert stats.chisquare(off_diagonal.numpy()).pvalue > 1e-3


def test_rows_of_unequal_population_stay_inside_their_own() -> None:
    drawn = RandomNumbers([1, 2], Purpose.REFERENCE).sample(0, [50, 5000], 10)
    assert drawn[0].max() < 50
    assert drawn[1].max() >= 50


def test_a_row_is_drawn_as_if_alone_whatever_the_populations_of_its_neighbours() -> None:
    step, populations = torch.tensor([3, 4, 5, 6]), [5000, 30, 12, 400]
    together = RandomNumbers([1, 2, 3, 4], Purpose.REFERENCE).sample(step, populations, 10)
    for r, population in enumerate(populations):
        alone = RandomNumbers([r + 1], Purpose.REFERENCE).sample(int(step[r]), [population], 10)
        assert torch.equal(together[r], alone[0])
