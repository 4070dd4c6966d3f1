"""Batch-norm with torch's constants or those of the A-GEM authors."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Constants = Literal["torch", "authors"]
SHARE = 0.1  # of a batch in the running statistics, for both


class BatchNorm(nn.BatchNorm2d):
    """`γ (x − m) / √(v + ε) + β`.

    `m` and `v` are a batch's own in training, and running ones in evaluation. Each training pass
    moves the running statistics, `r ← 0.9 r + 0.1 b`. With torch's constants they begin at mean 0
    and variance 1, take the unbiased variance of a batch, and `ε = 1e-5`. With those of the A-GEM
    authors they begin at mean 0 and variance 0, take the biased variance, and `ε = 1e-3`: in the
    first steps running variances are far too small, which shows in evaluations. Batches are not
    counted.
    """

    def __init__(self, features: int, constants: Constants = "torch") -> None:
        super().__init__(features, eps=1e-5 if constants == "torch" else 1e-3, momentum=SHARE)
        self.constants: Constants = constants
        # It is not needed, and counting takes a GPU as long as normalising.
        self.num_batches_tracked = None
        if constants == "authors":
            self.running_var.zero_()  # type: ignore[union-attr]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        state_dict.pop(f"{prefix}num_batches_tracked", None)  # in files from elsewhere
        nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.constants == "torch":
            return functional.batch_norm(
                x,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.training,
                SHARE,
                self.eps,
            )
        # On every device torch returns 1 / √(v + ε) with the biased variance.
        out, mean, inverse, *_ = torch._batch_norm_impl_index(
            x, self.weight, self.bias, None, None, True, SHARE, self.eps, True
        )
        assert self.running_mean is not None
        assert self.running_var is not None
        found = mean.detach(), inverse.detach().pow(-2).sub(self.eps)
        for running, batch in zip((self.running_mean, self.running_var), found, strict=True):
            running.copy_(torch.lerp(running, batch, SHARE))
        result: Tensor = out
        return result
