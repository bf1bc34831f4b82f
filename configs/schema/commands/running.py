"""`draft.yaml`, the file of `draftsmith run`: what was asked, and what was chosen for each stage. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import field_validator

from configs.schema.base import PositiveFloat, Settings, dotted
from configs.schema.commands.release import Engine
from configs.schema.data import PromptsConfig
from configs.schema.target import TargetConfig

Stage = Literal["rehearsal", "data", "cache", "train", "eval", "gate", "export", "check"]
STAGES: tuple[Stage, ...] = get_args(Stage)
DRAFT_FILE = "draft.yaml"
Where = Literal["here", "slurm", "k8s"]


class RunConfig(Settings):
    """`draft.yaml`: train a draft for a target and its prompts within a budget, judge it and export it.

    `data`, `cache`, `train` and `eval` change the configs of those stages' commands, by dotted keys or in sections. What is not
    asked for is chosen after the rehearsal, and may be changed by hand before the stage begins; `cache` None: no cache.
    """

    target: TargetConfig = TargetConfig()
    prompts: PromptsConfig = (
        PromptsConfig()
    )  # of the source self_seeded the target writes them; num_prompts: the most that are used
    engine: Engine | None = "vllm"  # that is to serve the draft; None: the draft is not exported
    budget_minutes: PositiveFloat = 60.0  # of wall clock for all stages
    recipe: str = "configs/heads/eagle3.yaml"  # of train/heads.py or train/distill.py
    gate: str = "configs/gates/run.yaml"
    launcher: str = "configs/accelerate/one_process_cpu.yaml"  # of `accelerate launch`, for data, cache and training
    num_processes: int = 1  # that it starts
    data: dict[str, Any] | None = None
    cache: dict[str, Any] | None = None
    train: dict[str, Any] | None = None
    eval: dict[str, Any] | None = None
    minutes: dict[str, float] = {}  # planned for each stage; none: nothing was chosen yet
    output: str = "runs/draft"  # folder

    @field_validator("data", "cache", "train", "eval", mode="before")
    @classmethod
    def _sections_become_dotted_keys(cls, value: Any) -> Any:
        return dict(dotted(value, takes_all=True)) if isinstance(value, dict) else value

    @property
    def unpacked(self) -> str | None:
        """The folder that the target of a .gguf file is unpacked into; None for other targets."""
        return f"{self.output}/target" if self.target.name.endswith(".gguf") else None

    @property
    def stage_target(self) -> TargetConfig:
        """The target as the stages read it."""
        return self.target if self.unpacked is None else self.target.model_copy(update={"name": self.unpacked})

    @property
    def is_chosen(self) -> bool:
        """Whether the rehearsal has been held and the stages' settings were chosen."""
        return bool(self.minutes)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of this run, in order."""
        left_out = {"cache"} if self.is_chosen and self.cache is None else set()
        if self.engine is None:
            left_out |= {"export", "check"}
        return tuple(each for each in STAGES if each not in left_out)
