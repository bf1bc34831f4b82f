"""What all config classes share: immutability, strict types, and the ranges of their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Dtype = Literal["bfloat16", "float16", "float32"]


class Settings(BaseModel):
    """A section of a config: immutable, strict types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def check_rising(name: str, values: Sequence[int] | None, what: str) -> None:
    """Refuse a list of numbers that does not rise.

    Raises:
        ValueError: naming the key and `what` its entries stand for.
    """
    if values is not None and sorted(set(values)) != list(values):
        raise ValueError(f"{name} must rise and name each {what} once, got {values}")
