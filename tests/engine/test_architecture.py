"""Where parameters and buffers lie, and programs for batches of other sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from onepass.engine.architecture import Architecture
from onepass.engine.batch import Batch
from onepass.engine.fleet import aligned
from onepass.engine.gradients import Mode
from onepass.engine.tracing import trace
from tests.toys import FEATURES, batch_of, by_hand, fleet_of


def test_parameters_may_begin_at_certain_places_and_what_is_between_them_stays_zero() -> None:
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(3, 5))
    packed, spread = (
        Architecture(module, lambda x: x),
        Architecture(module, lambda x: x, align=32, channels_last=True),
    )
    row, gaps = spread.flatten(module), spread.gaps()
    assert packed.gaps() is None
    assert gaps is not None
    assert len(row) == len(gaps) == spread.width == 4 * 32
    assert int((~gaps).sum()) == packed.size == spread.size
    assert not row[gaps].any()
    assert all(start % 32 == 0 for start in spread.starts)
    for mine, theirs, parameter in zip(
        spread.views(row), packed.views(packed.flatten(module)), module.parameters(), strict=True
    ):
        assert torch.equal(mine, parameter)
        assert torch.equal(theirs, parameter)
    assert torch.equal(
        spread.numbers(row[None])[0].sort().values, packed.flatten(module).sort().values
    )
    assert spread.views(row)[0].is_contiguous(memory_format=torch.channels_last)


class Tempered(nn.Module):
    """Learns a temperature: a parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.temperature = nn.Linear(FEATURES, 8), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.layer(x) * self.temperature
        return answer


@pytest.mark.parametrize("mode", ["looped", "stacked"])
def test_a_parameter_may_be_one_number(mode: Mode) -> None:
    fleet, batch = fleet_of(Tempered, mode=mode), batch_of()
    g, _ = fleet.grad(batch)
    assert torch.allclose(g[2], by_hand(fleet, batch, 2)[0], atol=1e-6)


def test_rows_of_buffers_begin_at_certain_places() -> None:
    stack = torch.randn(3, 5)
    found = aligned(stack, 32)
    assert torch.equal(found, stack)
    assert found.stride() == (32, 1)


@pytest.mark.parametrize("mode", ["looped", "stacked"])
def test_programs_for_further_sizes_of_batches_come_from_two_traces(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[Any] = []

    def counted(*arguments: Any) -> Any:
        traced.append(trace(*arguments))
        return traced[-1]

    monkeypatch.setattr("onepass.engine.gradients.trace", counted)
    fleet, generator = fleet_of(mode=mode), torch.Generator().manual_seed(0)
    for size in (4, 6, 7, 3):
        batch = Batch(
            torch.randn(3, size, FEATURES, generator=generator),
            torch.randint(0, 8, (3, size), generator=generator),
        )
        for _ in range(2):
            assert torch.allclose(fleet.grad(batch)[0][2], by_hand(fleet, batch, 2)[0], atol=1e-6)
    assert len(traced) == 2
