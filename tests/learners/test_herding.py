from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onepass.learners.icarl import herd


def brute_force(rows: Tensor, count: int) -> list[int]:
    mean, order = rows.mean(0), []
    for _ in range(count):
        left = [i for i in range(len(rows)) if i not in order]
        order.append(min(left, key=lambda i: float((mean - rows[[*order, i]].mean(0)).norm())))
    return order


@pytest.mark.parametrize(("size", "count"), [(1, 1), (3, 2), (5, 5), (12, 7), (40, 13)])
def test_herding_is_the_greedy_choice_by_brute_force(size: int, count: int) -> None:
    rows = torch.randn(4, size, 3, dtype=torch.float64)
    found = herd(rows, torch.ones(4, size, dtype=torch.bool), count)
    assert found.tolist() == [brute_force(row, count) for row in rows]


def test_rows_are_herded_on_their_own_and_among_their_members_alone() -> None:
    rows, members = torch.randn(5, 30, 4, dtype=torch.float64), torch.rand(5, 30) < 0.5
    rows[~members] = 1e6
    found = herd(rows, members, 9)
    for r in range(5):
        own = members[r].nonzero()[:, 0]
        assert found[r].tolist() == own[brute_force(rows[r][own], 9)].tolist()
        assert torch.equal(herd(rows[r : r + 1], members[r : r + 1], 9)[0], found[r])


def test_a_row_with_few_members_comes_first_with_all_of_them_and_does_not_disturb_others() -> None:
    rows, members = torch.randn(2, 9, 3, dtype=torch.float64), torch.ones(2, 9, dtype=torch.bool)
    members[0, 3:] = False
    found = herd(rows, members, 6)
    assert found[0, :3].tolist() == brute_force(rows[0, :3], 3)
    assert found[1].tolist() == brute_force(rows[1], 6)


def test_nobody_is_chosen_where_nobody_is() -> None:
    assert herd(torch.randn(2, 4, 3), torch.zeros(2, 4, dtype=torch.bool), 0).shape == (2, 0)
