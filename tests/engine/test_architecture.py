"""Where parameters and buffers lie."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onepass.engine.architecture import Architecture, aligned
from onepass.engine.gradients import Mode
from tests.toys import FEATURES, batch_of, by_hand, fleet_of


def test_parameters_begin_at_aligned_places_with_zeros_in_between() -> None:
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(3, 5))
    packed = Architecture(module, lambda x: x)
    spread = Architecture(module, lambda x: x, align=32, channels_last=True)
    row, gaps = spread.flatten(module), spread.gaps()
    assert packed.gaps() is None
    assert gaps is not None
    assert len(row) == len(gaps) == spread.width == 4 * 32
    assert int((~gaps).sum()) == packed.size == spread.size
    assert not row[gaps].any()
    assert all(start % 32 == 0 for start in spread.starts)
    whole = packed.flatten(module)
    views = zip(spread.views(row), packed.views(whole), module.parameters(), strict=True)
    for mine, theirs, parameter in views:
        assert torch.equal(mine, parameter)
        assert torch.equal(theirs, parameter)
    assert torch.equal(spread.numbers(row[None])[0].sort().values, whole.sort().values)
    assert spread.views(row)[0].is_contiguous(memory_format=torch.channels_last)


class Tempered(nn.Module):
    """Learns a temperature: a parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.temperature = nn.Linear(FEATURES, 8), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * self.temperature
        return out


@pytest.mark.parametrize("mode", ["looped", "stacked"])
def test_a_parameter_may_be_one_number(mode: Mode) -> None:
    fleet, batch = fleet_of(Tempered, mode=mode), batch_of()
    g, _ = fleet.grad(batch)
    assert torch.allclose(g[2], by_hand(fleet, batch, 2)[0], atol=1e-6)


def test_rows_of_buffers_begin_at_aligned_places() -> None:
    stack = torch.randn(3, 5)
    found = aligned(stack, 32)
    assert torch.equal(found, stack)
    assert found.stride() == (32, 1)
