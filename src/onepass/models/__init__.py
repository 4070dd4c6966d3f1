"""Networks, by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import nn

from onepass.errors import InputError
from onepass.models.initial import Initialisation
from onepass.models.mlp import mlp
from onepass.models.norm import Constants
from onepass.models.resnet import ResNet, Stem
from onepass.settings import setting

Kind = Literal["mlp", "resnet18-reduced", "resnet18"]
WIDTHS: dict[Kind, int] = {"resnet18-reduced": 20, "resnet18": 64}


@dataclass(frozen=True)
class Network:
    """The settings of a network, which fit any examples and any number of outputs.

    `hidden` belongs to the MLP, `stem` and `batch_norm` to residual networks.
    """

    network: Kind = setting("mlp", later=True)
    hidden: tuple[int, ...] = (256, 256)
    stem: Stem = setting("3x3", later=True)
    batch_norm: Constants = setting("torch", later=True)
    initialisation: Initialisation = setting("normal", later=True)

    @property
    def convolutional(self) -> bool:
        return self.network != "mlp"

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise unless the network can be built for examples of this shape."""
        if self.convolutional and len(shape) != 3:
            raise InputError(
                f"{self.network} needs a stream of images, such as split-cifar:"
                " choose network=mlp for this one"
            )

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Build the network for examples of this shape: `(D,)` or (height, width, channels)."""
        self.check(shape)
        if not self.convolutional:
            return mlp(math.prod(shape), self.hidden, outputs, self.initialisation)
        return ResNet(
            WIDTHS[self.network],
            outputs,
            channels=shape[2],
            stem=self.stem,
            batch_norm=self.batch_norm,
            initialisation=self.initialisation,
        )
