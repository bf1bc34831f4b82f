"""The cost model's settings: which rounds are timed (`eval.timing_sweep`), and what is asked of it. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from configs.settings import PositiveInt, Settings


class CostConfig(Settings):
    """A timing sweep: every number of drafts at each batch size in the first context, and at each context in the first batch.

    What a round of other sizes takes is interpolated, and beyond the largest follows a fit. About half a minute with
    SmolLM2-135M on two cores; `repeats: 1` takes a third of it.
    """

    num_speculative_tokens: PositiveInt = 8  # 1 to this many, or as many as the draft can
    batch_sizes: list[PositiveInt] = Field(default=[1, 8], min_length=1)
    context_tokens: list[Annotated[int, Field(ge=8)]] = Field(default=[128, 512], min_length=1)
    repeats: PositiveInt = 3

    @model_validator(mode="after")
    def _sizes_rise(self) -> Self:
        for name in ("batch_sizes", "context_tokens"):
            sizes = getattr(self, name)
            if sorted(set(sizes)) != sizes:
                raise ValueError(f"{name} must rise and name each size once, got {sizes}")
        return self


class PredictConfig(Settings):
    """`eval/predict.py`: what another machine would make of a report's draft."""

    batch_sizes: list[PositiveInt] = Field(default=[1, 4, 16, 64, 256], min_length=1)
    context_tokens: PositiveInt | None = None  # None: as long as in the report
