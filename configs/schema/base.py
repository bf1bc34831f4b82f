"""What all config classes share: immutability, strict types, and the ranges of their numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, WrapValidator, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Policy = Literal["refuse", "skip"]  # of what cannot be used: it ends the run, or is left out and counted
Dtype = Literal["bfloat16", "float16", "float32"]
MIN_TEMPERATURE = 1e-4
AUTO: Any = "auto"  # a setting that follows from target and data, whose type is that of what `train.resolve` makes of it


def _unless_auto(value: Any, check: Callable[[Any], Any]) -> Any:
    return value if value == AUTO else check(value)


AS_IT_IS = PlainSerializer(lambda value: value, return_type=Any)
AutoInt = Annotated[PositiveInt, WrapValidator(_unless_auto), AS_IT_IS]
AutoBlock = Annotated[NonNegativeInt, WrapValidator(_unless_auto), AS_IT_IS]
AutoFloat = Annotated[PositiveFloat, WrapValidator(_unless_auto), AS_IT_IS]
AutoBlocks = Annotated[list[NonNegativeInt], WrapValidator(_unless_auto), AS_IT_IS]
Setting = bool | int | float | str | None  # a value in a change to a recipe, which another command's config gives
Value = Setting | list[int]


def _divides_logits(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, below which logits overflow")
    return temperature


Temperature = Annotated[float, Field(ge=0), AfterValidator(_divides_logits)]  # 0 is greedy


class Settings(BaseModel):
    """A section of a config: immutable, strict types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        for objection in self.objections():
            raise ValueError(objection)
        return self

    def objections(self) -> Iterator[str]:
        """Yield what is wrong with the values together, a sentence each; the first is the error."""
        yield from ()


def unless_rising(name: str, values: Sequence[int] | None, what: str) -> Iterator[str]:
    """Object to a list of numbers that does not rise; `what` its entries stand for."""
    if values is not None and sorted(set(values)) != list(values):
        yield f"{name} must rise and name each {what} once, got {values}"


def unless_once(name: str, values: Sequence[str], what: str) -> Iterator[str]:
    """Object to a list that names something twice; `what` its entries stand for."""
    if len(set(values)) < len(values):
        yield f"{name} must name each {what} once, got {values}"


def unless_a_variable(name: str | None) -> Iterator[str]:
    """Object to what cannot be an environment variable's name: it may be the key itself, and is not repeated."""
    if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        yield "api_key_variable must be the name of an environment variable, such as SERVER_KEY, not the key"


def unless_plain_url(url: str, key: str, instead: str = "") -> Iterator[str]:
    """Object to what is no address of an API, and to secrets in one: it is written beside what the server gave."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        yield f"{key} must be that of an API, such as http://host:8000/v1"
    if parts.username or parts.password or parts.query or parts.fragment:  # which stay out of this sentence, too
        yield f"{key} must hold no user, password or query{instead}"


def dotted(section: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested sections under its dotted key; an empty section, which turns on what is off, is a value."""
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from dotted(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
