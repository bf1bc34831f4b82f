"""The config of `scripts/lab/sweep.py`. Imports no torch."""

from __future__ import annotations

from itertools import product
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from configs.schema.base import NonNegativeFloat, PositiveInt, Settings
from configs.schema.commands.recipe_changes import Setting, check_names, dotted
from configs.schema.learning import LossConfig, PolicyConfig

# Keys of the recipe that the sweep sets itself, and where what is wanted of them is said.
DECIDED = {
    "loss": "give it under divergences",
    "policy": "give it under policies",
    "output": "give output of the sweep",
    "schedule.resume": "a cell that was cut off begins anew, so that its time is all of it",
}


class SweptPolicy(PolicyConfig):
    """A data policy, and the conversations for it where they are others than the recipe's."""

    train: str | None = None  # e.g. answers of a data set; None: data.train of the recipe


class SweepConfig(Settings):
    """`scripts/lab/sweep.py`: train a draft by each of several recipes, decode held-out prompts with it, and choose."""

    distill: str = "configs/distill/demo.yaml"  # the recipe that all cells share
    # changes to it for all cells, by dotted keys or in sections
    settings: dict[str, Setting] = Field(default_factory=dict)
    divergences: dict[str, LossConfig] = Field(default_factory=lambda: {"forward_kl": LossConfig()})
    policies: dict[str, SweptPolicy] = Field(default_factory=lambda: {"target_answers": SweptPolicy()})
    # cross: all pairs; axes: every divergence with the first policy, and every policy with the first divergence
    cells: Literal["cross", "axes"] = "axes"
    num_prompts: PositiveInt = 32  # held-out prompts decoded for tau, the last of the file: the first chose the draft
    max_new_tokens: PositiveInt = 48
    num_speculative_tokens: PositiveInt | None = None  # None: as in the recipe
    batch_size: PositiveInt = 16  # prompts decoded together
    temperatures: list[NonNegativeFloat] = Field(default_factory=lambda: [0.0, 1.0])
    bootstrap_samples: PositiveInt = 10_000  # many: the verdict reads further out in the tails than the rows do
    output: str = "runs/sweep"  # folder: sweep.json, cells/NAME/

    @field_validator("settings", mode="before")
    @classmethod
    def _sections_become_dotted_keys(cls, value: Any) -> Any:
        """Read `{schedule: {seed: 1}}`, which `--set settings.schedule.seed=1` gives as well, as `{schedule.seed: 1}`."""
        return dict(dotted(value)) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _settings_leave_the_sweep_its_part(self) -> Self:
        for key in self.settings:
            for decided, instead in DECIDED.items():
                if f"{key}.".startswith(f"{decided}."):
                    raise ValueError(f"settings.{key} is for the sweep to decide: {instead}")
        return self

    @model_validator(mode="after")
    def _there_are_cells_with_names(self) -> Self:
        for axis, names in (("divergences", self.divergences), ("policies", self.policies)):
            if not names:
                raise ValueError(f"{axis} is empty, so that there is no cell to train; give at least one by name")
            check_names(axis, names)
        if not self.temperatures or len(set(self.temperatures)) != len(self.temperatures):
            raise ValueError(f"temperatures must be at least one and each another, got {self.temperatures}")
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The cells as names of divergence and policy. The first, of both firsts, is what the others are compared with."""
        if self.cells == "cross":
            return list(product(self.divergences, self.policies))
        divergences, policies = list(self.divergences), list(self.policies)
        return [*product(divergences, policies[:1]), *product(divergences[:1], policies[1:])]
