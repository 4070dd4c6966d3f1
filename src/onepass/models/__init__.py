"""Networks, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from onepass.errors import InputError
from onepass.models.initial import Initialisation
from onepass.models.mlp import mlp
from onepass.models.norm import Constants
from onepass.models.resnet import ResNet, Stem

Kind = Literal["mlp", "resnet18-reduced", "resnet18"]
WIDTHS: dict[Kind, int] = {"resnet18-reduced": 20, "resnet18": 64}


@dataclass(frozen=True)
class Network:
    """A network without its inputs and outputs. `hidden` belongs to the MLP, `stem` and `batch_norm` to residual networks."""

    kind: Kind = "mlp"
    hidden: Sequence[int] = (256, 256)
    stem: Stem = "3x3"
    batch_norm: Constants = "torch"
    initialisation: Initialisation = "normal"

    @property
    def convolutional(self) -> bool:
        return self.kind != "mlp"

    def check(self, image: tuple[int, int, int] | None) -> None:
        """Raise unless it can be built for examples that are such images, or none."""
        if self.convolutional and image is None:
            raise InputError(
                f"{self.kind} needs a stream of images, such as split-cifar: choose network=mlp for this one"
            )

    def build(self, inputs: int, image: tuple[int, int, int] | None, outputs: int) -> nn.Module:
        """The network for examples of so many numbers, which are an image of this height, width and channels, or none."""
        if not self.convolutional:
            return mlp(inputs, self.hidden, outputs, self.initialisation)
        self.check(image)
        assert image is not None
        return ResNet(
            WIDTHS[self.kind],
            outputs,
            channels=image[2],
            stem=self.stem,
            batch_norm=self.batch_norm,
            initialisation=self.initialisation,
        )
