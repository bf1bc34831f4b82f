"""`draft.yaml`, the file of `draftsmith run`: what was asked, and what was chosen for each stage. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator

from configs.runtime.loading import load_config
from configs.schema.base import PositiveFloat, PositiveInt, Settings, dotted
from configs.schema.commands.release import Engine
from configs.schema.data import PromptsConfig
from configs.schema.target import TargetConfig

Stage = Literal["dry_run", "data", "mix", "cache", "train", "baseline", "eval", "export", "check", "gate"]
STAGES: tuple[Stage, ...] = get_args(Stage)
DRAFT_FILE = "draft.yaml"
Where = Literal["here", "slurm", "k8s"]


class RefreshConfig(Settings):
    """A served draft that is trained on with a log of what it was asked, which `prompts` names."""

    # The artifact in service, a head or a draft LM made for the target: a folder, or owner/name on the Hub
    served: str = "release/artifact"
    # When a row was served: seconds or milliseconds since 1970, or ISO 8601. None: time, timestamp, created, created_at or ts,
    # of the row or of its request, response or body
    time_field: str | None = None
    replay: str | None = None  # train.jsonl that the served draft was trained on; None: data.train of its recipe
    replay_share: Annotated[float, Field(ge=0, lt=1)] = 0.3  # of the conversations trained on
    # --drift, which decodes prompts of each week of the log that the draft was not trained on
    prompts_per_week: PositiveInt = 64  # spread evenly over the week
    min_prompts: PositiveInt = 8  # a week with fewer is named and not measured


class RunConfig(Settings):
    """`draft.yaml`: train a draft for a target and its prompts within a budget, judge it and export it.

    `data`, `cache`, `train` and `eval` change the configs of those stages' commands, by dotted keys or in sections. What is not
    asked for is chosen after a dry run, and may be changed by hand before the stage begins; `cache` None: no cache.
    """

    target: TargetConfig = TargetConfig()
    prompts: PromptsConfig = (
        PromptsConfig()
    )  # of the source self_seeded the target writes them; num_prompts: the most that are used
    refresh: RefreshConfig | None = None  # --from: the draft to train on; None: a new one
    engine: Engine | None = "vllm"  # that is to serve the draft; None: the draft is not exported
    budget_minutes: PositiveFloat = 60.0  # of wall clock for all stages
    recipe: str = "configs/heads/eagle3.yaml"  # of train/heads.py or train/distill.py
    gate: str = "configs/gates/run.yaml"
    launcher: str = "configs/accelerate/one_process_cpu.yaml"  # of `accelerate launch`, for data, cache and training
    num_processes: PositiveInt = 1  # that it starts
    data: dict[str, Any] | None = None
    cache: dict[str, Any] | None = None
    train: dict[str, Any] | None = None
    eval: dict[str, Any] | None = None
    minutes: dict[str, float] = {}  # planned for each stage; none: nothing was chosen yet
    output: str = "runs/draft"  # folder; of a draft.yaml its own

    @field_validator("data", "cache", "train", "eval", mode="before")
    @classmethod
    def _sections_become_dotted_keys(cls, value: Any) -> Any:
        return dict(dotted(value)) if isinstance(value, dict) else value

    @property
    def unpacked(self) -> str | None:
        """The folder that the target of a .gguf file is unpacked into; None for other targets."""
        return f"{self.output}/target" if self.target.name.endswith(".gguf") else None

    @property
    def stage_target(self) -> TargetConfig:
        """The target as the stages read it."""
        return self.target if self.unpacked is None else self.target.model_copy(update={"name": self.unpacked})

    @property
    def stage_prompts(self) -> PromptsConfig:
        """The prompts as the stages read them: those of a log cleaned and written into the output."""
        if self.refresh is None:
            return self.prompts
        path = str(Path(self.output) / "log" / "prompts.jsonl")
        return PromptsConfig(source="file", path=path, num_prompts=self.prompts.num_prompts, on_too_long="skip")

    @property
    def is_chosen(self) -> bool:
        """Whether the dry run is done and the stages' settings were chosen."""
        return bool(self.minutes)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of this run, in order."""
        left_out = {"cache"} if self.is_chosen and self.cache is None else set()
        if self.engine is None:
            left_out |= {"export", "check"}
        if self.refresh is None:
            left_out |= {"mix", "baseline"}
        return tuple(each for each in STAGES if each not in left_out)


def read_draft_file(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the run of a draft.yaml, whose output is the folder of the file."""
    return load_config(RunConfig, path, overrides).model_copy(update={"output": str(path.absolute().parent)})
