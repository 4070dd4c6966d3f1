"""Options of streams and methods: values of the right type, or a sentence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from onepass.errors import InputError, unknown
from onepass.learners import method
from onepass.streams import stream

LARGEST, SMALLEST = 1e12, 1e-30  # what float32 can still calculate with
Count = Annotated[int, Field(gt=0, le=2**31, strict=True)]


def read_options(kind: type, values: dict[str, Any], strict: bool = True) -> Any:
    """Options of a stream or a method.

    A whole number among them is a count, so it is at least 1, and no number is negative.
    With `strict` no value of one type is taken for another: `true` is not 1, and 3.0 is not 3.
    """
    types, given = get_type_hints(kind), {}
    for key, value in values.items():
        if key not in types:
            raise unknown("option", key, types)
        try:
            given[key] = TypeAdapter(types[key]).validate_python(value, strict=strict)
        except ValidationError as error:
            says = error.errors()[0]["msg"]
            raise InputError(f"{key}={value!r} is not valid: {says[0].lower()}{says[1:]}") from None
    made = kind(**given)
    for key, value in dataclasses.asdict(made).items():
        if type(value) is int and value < 1:
            raise InputError(f"{key}={value} is not valid: it must be at least 1")
        if type(value) is int and value > 2**31:
            raise InputError(f"{key}={value} is not valid: it must be at most {2**31}")
        if type(value) is float and value != 0 and not SMALLEST <= value <= LARGEST:
            raise InputError(
                f"{key}={value} is not valid: it must be 0, or between {SMALLEST:g} and {LARGEST:g}"
            )
    return made


def with_types(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored recipe with options of the types they have today.

    Earlier versions took `true` for 1, and stored `true`.
    """

    def typed(kind: type, values: dict[str, Any]) -> dict[str, Any]:
        made = read_options(kind, values, strict=False)
        return {key: getattr(made, key) for key in values}

    document = dict(stored)
    of_stream, of_methods = document.get("stream_options"), document.get("options")
    if isinstance(of_stream, dict):
        document["stream_options"] = typed(stream(document["stream"]).options, of_stream)
    if isinstance(of_methods, dict) and all(isinstance(v, dict) for v in of_methods.values()):
        document["options"] = {
            name: typed(method(name).learner.options, values) for name, values in of_methods.items()
        }
    return document
