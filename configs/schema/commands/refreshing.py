"""The config of `scripts/refresh.py`: the log of served conversations, what is trained of it, and what is measured.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from configs.schema.base import NonNegativeInt, PositiveInt, Setting, Settings, dotted
from configs.schema.commands.release import Engine
from configs.schema.data import AnswersConfig, ServerConfig, unless_served
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import GateConfig, GateRule, LosslessConfig, SuiteConfig
from configs.schema.target import TargetConfig

TAU = "acceptance.tokens_per_target_step"
TRAFFIC, OLD = "traffic", "old"  # names of the suites in reports and rules


class LogConfig(Settings):
    """Served conversations: JSON lines and the other files that prompts are read from."""

    path: str = "logs"  # a file, or a folder of them
    field: str = "prompt"  # the column with the prompt, of rows that are no chat (distill/generation/row_formats.py)
    # When a row was served: seconds or milliseconds since 1970, or ISO 8601. None: time, timestamp, created, created_at or ts,
    # of the row or of its request, response or body
    time_field: str | None = None
    num_conversations: PositiveInt = 2000  # the newest that are left after cleaning; by their times, else the last of the log
    # drop: a conversation that shares half of its runs of four words with a newer one, as the turns of one chat do
    near_duplicates: Literal["drop", "keep"] = "drop"


class DriftConfig(Settings):
    """`--drift`: tau of the served draft on the prompts of each week of the log."""

    prompts_per_week: PositiveInt = 64  # spread evenly over the week; prompts that the draft was trained on are left out
    min_prompts: PositiveInt = 8  # a week with fewer is named and not measured
    num_weeks: PositiveInt = 12  # the newest


class RefreshConfig(Settings):
    """`scripts/refresh.py`: train the served draft on with its traffic, and judge the result against it."""

    target: TargetConfig = TargetConfig()
    served: str = "release/artifact"  # the artifact in service: a head or a draft LM made for the target
    log: LogConfig = LogConfig()
    answers: AnswersConfig = AnswersConfig()  # who answers the log's prompts: the target, here or on a server
    server: ServerConfig | None = None  # answers.written_by server
    held_out_share: Annotated[float, Field(gt=0, lt=1)] = 0.2  # of the prompts, by a hash that never moves between runs
    replay: str | None = None  # train.jsonl that the served draft was trained on; None: data.train of its recipe
    replay_share: Annotated[float, Field(ge=0, lt=1)] = 0.3  # of the conversations trained on
    recipe: str | None = None  # of train/heads.py or train/distill.py; None: the one that the artifact was trained by
    # Changes to it, by dotted keys or in sections, such as {schedule: {max_steps: 200}}
    training: dict[str, Setting] = Field(default_factory=dict)
    accelerate: str | None = None  # a file for `accelerate launch`; None: the training is one process
    decode: DecodeConfig = DecodeConfig()  # how both drafts are measured
    old_suite: SuiteConfig = SuiteConfig()  # what the draft was good at, for what it forgets; in reports and rules: old
    max_suite_prompts: PositiveInt = 256  # held-out prompts of the log that are measured; in reports and rules: traffic
    repeats: PositiveInt = 1  # timed runs of every prompt
    lossless: LosslessConfig = LosslessConfig()
    bootstrap_samples: PositiveInt = 2000  # of prompts, for each interval
    # Rules of the verdict; relative_to_baseline is to the served draft. By default tau on the traffic must not fall, and on the
    # old suite by at most 3 %
    gate: GateConfig = GateConfig(
        rules=[
            GateRule(metric=TAU, min=1.0, relative_to_baseline=True),
            GateRule(metric=TAU, suite=OLD, min=0.97, relative_to_baseline=True),
        ]
    )
    # Engines that the new draft is exported for once the gate has passed
    exports: list[Engine] = []
    drift: DriftConfig = DriftConfig()
    seed: NonNegativeInt = 0  # of answers that are drawn, and of the choice of replayed conversations
    output: str = "runs/refresh"  # folder: refresh.json, refresh.md, train/artifact, export/; drift/eval

    @field_validator("training", mode="before")
    @classmethod
    def _sections_become_dotted_keys(cls, value: Any) -> Any:
        return dict(dotted(value)) if isinstance(value, dict) else value

    def objections(self) -> Iterator[str]:
        if self.answers.written_by == "dataset":
            yield (
                "answers.written_by must be target or server, got dataset: a log's answers are texts, and a draft learns from "
                "the tokens that the target writes"
            )
        yield from unless_served(self.answers.written_by, self.server)
