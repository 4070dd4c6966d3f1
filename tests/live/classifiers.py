"""Data, modules and comparisons for tests of the classifier for scikit-learn."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import make_blobs
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from onepass import OnePassClassifier
from onepass.learners import METHODS
from tests.live.modules import LIVE

STREAMING = [name for name in LIVE if not METHODS[name].learner.needs.own_classes]


def blobs(classes: int = 4, rows: int = 200, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    X, y = make_blobs(rows, n_features=5, centers=classes, cluster_std=1.5, random_state=seed)
    return StandardScaler().fit_transform(X), y


def state(learner: OnePassClassifier) -> list[np.ndarray]:
    return [p.detach().numpy().copy() for p in learner.learner_.module.parameters()]


def same(one: OnePassClassifier, other: OnePassClassifier) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(state(one), state(other), strict=True))


class Odd(nn.Module):
    """Draws random numbers and has buffers that move."""

    def __init__(self, features: int = 5, classes: int = 2) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(features, 16), nn.BatchNorm1d(16)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(torch.relu(self.norm(self.body(x)))))
        return out
