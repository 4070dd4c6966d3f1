"""Progressive columns (Rusu et al.: Progressive neural networks, 2016)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from onepass.models.stages import Stage, stages


class Progressive(nn.Module):
    """One column per task; all but the last are frozen.

    `h_s^k = then(body_s^k(h_{s−1}^k) + Σ_{j<k} lateral_s^{kj} h_{s−1}^j)`

    `build` makes the network of one column. `input_laterals` connects raw inputs laterally too,
    `lateral_biases` gives every lateral connection a bias of its own, 0.1 at first. Frozen columns
    are built without values: they get theirs from the network that had one column less.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        columns: int,
        input_laterals: bool = False,
        lateral_biases: bool = False,
    ) -> None:
        super().__init__()
        self.shown = columns - 1  # the column whose outputs are returned
        made = []
        for k in range(columns - 1):
            with torch.device("meta"):
                frozen = _Column(stages(build()), k, input_laterals, lateral_biases)
            frozen.to_empty(device=torch.get_default_device()).requires_grad_(False).eval()
            made.append(frozen)
        made.append(_Column(stages(build()), columns - 1, input_laterals, lateral_biases))
        self.columns = nn.ModuleList(made)

    def train(self, mode: bool = True) -> Progressive:
        """Frozen columns stay as in evaluation, batch-norm and all."""
        super().train(mode)
        for column in list(self.columns)[:-1]:
            column.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        found = list(self.columns)[: self.shown + 1]
        columns = [column for column in found if isinstance(column, _Column)]
        levels = [x] * len(columns)  # the inputs of a stage in each column
        for s, then in enumerate(columns[-1].then):
            left = torch.cat(levels[:-1], 1) if len(columns) > 1 else x
            width = levels[0].shape[1]
            is_head = s + 1 == len(columns[-1].then)  # which only the last column needs
            levels = [
                then(columns[k].at(s, levels[k], left[:, : k * width]))
                for k in range(len(columns) - 1 if is_head else 0, len(columns))
            ]
        return levels[0]


class _Column(nn.Module):
    def __init__(
        self, made: list[Stage], number: int, input_laterals: bool, lateral_biases: bool
    ) -> None:
        super().__init__()
        self.bodies = nn.ModuleList(stage.body for stage in made)
        self.then = [stage.then for stage in made]
        connected = range(0 if input_laterals else 1, len(made)) if number else ()
        self.laterals = nn.ModuleDict({str(s): made[s].lateral(number) for s in connected})
        self.biases = nn.ParameterDict()
        for s, lateral in self.laterals.items() if lateral_biases else ():
            outputs = next(lateral.parameters()).shape[0]
            self.biases[s] = nn.Parameter(torch.full((number, outputs), 0.1))

    def at(self, s: int, own: Tensor, left: Tensor) -> Tensor:
        out: Tensor = self.bodies[s](own)
        if str(s) in self.laterals:
            out = out + self.laterals[str(s)](left)
        if str(s) in self.biases:
            out = out + self.biases[str(s)].sum(0).view(-1, *[1] * (out.dim() - 2))
        return out
