"""What the paper says, for comparison; no part of a study."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from onepass.learners import method
from onepass.studies.options import Count

FOLDER: Any = resources.files("onepass.studies") / "recipes"
KNOWN_DIFFERENCES = "known-differences.toml"  # in that folder

Product = Annotated[str, Field(pattern=r"^[PBHMT](\*[PBHMT])*$")]


class Model(BaseModel):
    """Data that are not changed and have no other fields than these."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Companions(Model):
    """The paper's side tables.

    They have the training `seconds` of a run, the steps of each task that violated a constraint,
    and what a method holds while it trains. This `state` is a sum in numbers of 4 bytes, one factor
    per product: `2*P + M*H` is `{ P = 2, "M*H" = 1 }`. P are the parameters, B the examples of a
    batch, H the hidden units of the network, M the examples of the episodic memory, T the tasks.
    """

    seconds: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = {}
    violations: dict[str, list[Annotated[int, Field(ge=0, strict=True)]]] = {}
    state: dict[str, Annotated[dict[Product, Count], Field(min_length=1)]] = {}

    @field_validator("seconds", "violations", "state", mode="after")
    @classmethod
    def _methods_exist(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name in given:
            method(name)
        return given


class Paper(Model):
    """What the paper reports for a stream.

    These are the hyper-parameters it chose, and for each metric `[mean]` or `[mean, standard
    deviation]`. The spread is a population standard deviation over `runs` runs. That a method
    diverged or ran out of memory is a result too.
    """

    runs: Count = 5
    selected: dict[str, dict[str, float]] = {}
    published: dict[str, dict[str, list[float]] | Literal["diverged", "out of memory"]] = {}
    companions: Companions = Companions()


class KnownDifference(Model):
    """A result that is not the published one, and the experiment that shows why."""

    recipe: str
    method: str
    metric: str
    explanation: str
    experiment: str  # the command, and where its outcome is written down


def known_differences(name: str) -> list[KnownDifference]:
    """The known differences of one recipe."""
    document = tomllib.loads((FOLDER / KNOWN_DIFFERENCES).read_text(encoding="utf-8"))
    known = [KnownDifference(**entry) for entry in document.get("difference", [])]
    return [difference for difference in known if difference.recipe == name]
