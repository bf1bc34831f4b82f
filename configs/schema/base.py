"""What all config classes share: immutability, strict types, and the ranges of their numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from configs.schema.retired import read_retired

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Dtype = Literal["bfloat16", "float16", "float32"]
MIN_TEMPERATURE = 1e-4


def _divides_logits(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, below which logits overflow; got {temperature:g}"
        )
    return temperature


Temperature = Annotated[float, Field(ge=0), AfterValidator(_divides_logits)]  # 0 is greedy


class Settings(BaseModel):
    """A section of a config: immutable, strict types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _reads_keys_of_before(cls, values: Any) -> Any:
        return read_retired((each.__name__ for each in cls.__mro__), values)


def check_rising(name: str, values: Sequence[int] | None, what: str) -> None:
    """Refuse a list of numbers that does not rise.

    Raises:
        ValueError: naming the key and `what` its entries stand for.
    """
    if values is not None and sorted(set(values)) != list(values):
        raise ValueError(f"{name} must rise and name each {what} once, got {values}")


def check_key_variable(name: str | None) -> None:
    """Refuse, by `ValueError`, what cannot be an environment variable's name: it may be the key itself, and is not repeated."""
    if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("api_key_variable must be the name of an environment variable, such as SERVER_KEY, not the key")


def check_plain_url(url: str, key: str, instead: str = "") -> None:
    """Refuse what is no address of an API, and secrets in one: it is written beside what the server gave.

    Args:
        key: names the setting in the error.
        instead: ends the sentence on secrets, with where they belong.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(f"{key} must be that of an API, such as http://host:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:  # which stay out of this sentence, too
        raise ValueError(f"{key} must hold no user, password or query{instead}")
