"""Whose answers a draft is trained on: the data set's rows as they stand, or in part written anew by the draft itself.

Imports no torch; what the settings do is in `distill.policy`.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from configs.settings import NonNegativeFloat, PositiveInt, Settings, Share


class DataPhase(Settings):
    """A part of a run, up to the next phase. What no share names is trained on as it stands in the data."""

    from_share: Share = 0.0  # of the run's optimiser steps, after which this phase holds
    on_policy: Share = 0.0  # of each batch: the draft writes the answer anew
    draft_states: Share = 0.0  # of each batch: the answer is cut somewhere, and drafts of one speculative round follow

    @model_validator(mode="after")
    def _shares_fit_into_a_batch(self) -> Self:
        if self.on_policy + self.draft_states > 1:
            raise ValueError(
                "on_policy and draft_states are shares of one batch and may not exceed 1 together, got "
                f"{self.on_policy:g} and {self.draft_states:g}"
            )
        return self

    @property
    def rewrites(self) -> bool:
        """Whether the draft writes anything."""
        return self.on_policy + self.draft_states > 0


class PolicyConfig(Settings):
    """The phases of a run, and how the draft's tokens are drawn in them. By default it draws none."""

    phases: list[DataPhase] = Field(default_factory=lambda: [DataPhase()])
    temperature: NonNegativeFloat = 1.0  # of the draft's draws; 0 is greedy
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None  # of the draft's draws
    num_draft_tokens: PositiveInt | None = None  # draft_states; None: the run's num_speculative_tokens
    max_new_tokens: PositiveInt | None = None  # on_policy: longest answer; None: as long as the one in the data

    @model_validator(mode="after")
    def _phases_follow_one_another(self) -> Self:
        starts = [phase.from_share for phase in self.phases]
        if not starts or starts[0] != 0:
            raise ValueError(f"the first phase must have from_share 0, got {starts[0] if starts else 'no phase'}")
        if starts != sorted(set(starts)):
            raise ValueError(f"from_share must rise from phase to phase, got {', '.join(f'{start:g}' for start in starts)}")
        return self

    @property
    def rewrites(self) -> bool:
        """Whether the draft writes anything in any phase."""
        return any(phase.rewrites for phase in self.phases)

    def phase_after(self, share: float) -> DataPhase:
        """Return the phase that holds once this share, 0 to 1, of the run's optimiser steps is done."""
        return next(phase for phase in reversed(self.phases) if phase.from_share <= share)
