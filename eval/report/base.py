"""What every section of a report is made of: the two kinds of section, and the types of their numbers.

Apart from `eval.report.schema`, which puts the sections together, so that sections of their own files can use it.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Number = float | None
Bounds = Annotated[list[float], Field(min_length=2, max_length=2)] | None
Count = Annotated[int, Field(ge=0)]


class Measured(BaseModel):
    """A section of numbers: strict types, no unknown fields, every interval the right way round."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _intervals_rise(self) -> Self:
        for name, value in self:
            if name.endswith("_ci") and value is not None and value[0] > value[1]:
                raise ValueError(f"{name} must be [low, high], got {value}")
        return self


class Described(BaseModel):
    """A section that says what was measured; it may hold more than the fields named."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
