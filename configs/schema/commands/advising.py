"""The config of `scripts/advise.py`: which drafts to try, on how much data, and how they are measured. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from configs.schema.base import NonNegativeInt, PositiveFloat, PositiveInt, Settings, Value, unless_names, unless_rising
from configs.schema.commands.planning import HardwareConfig
from configs.schema.commands.release import Engine
from configs.schema.data import AnswersConfig, PromptsConfig
from configs.schema.evaluation import CostConfig
from configs.schema.target import TargetConfig

BelowOne = Annotated[float, Field(gt=0, lt=1)]


class FamilyTrials(Settings):
    """A family to try: its recipe, and the values of which every combination is a trial."""

    recipe: str  # of train/heads.py or, with a section student, of train/distill.py; its target, data and output are not read
    # Dotted keys of the recipe, each with the values to try, such as {head.num_layers: [1, 2]}. One value is a change for all
    values: dict[str, Annotated[list[Value], Field(min_length=1)]] = {}


def _default_families() -> dict[str, FamilyTrials]:
    return {
        "hydra": FamilyTrials(recipe="configs/heads/hydra.yaml", values={"head.num_layers": [1]}),
        "eagle3": FamilyTrials(recipe="configs/heads/eagle3.yaml", values={"head.num_layers": [1, 2]}),
        "draft_lm": FamilyTrials(recipe="configs/distill/draft_lm.yaml", values={"student.layers": [[0, 1], [0, 1, 2, 3]]}),
    }


class AdviceConfig(Settings):
    """`scripts/advise.py`: train small trials for a target and its prompts, and say which draft to train."""

    target: TargetConfig = TargetConfig()  # its name is the command's TARGET
    # What the draft will be asked; path is the command's --prompts, and num_prompts the most that are answered
    prompts: PromptsConfig = PromptsConfig(source="file", path="prompts.jsonl", num_prompts=4000, on_too_long="skip")
    # A folder of scripts/data.py with this target's answers, which are then taken as they are, and no prompts are answered
    data: str | None = None
    answers: AnswersConfig = AnswersConfig(max_new_tokens=64)  # the target's, which drafts are trained on
    held_out_share: BelowOne = 0.15  # of the prompts, for measuring
    budget_minutes: PositiveFloat = 30.0  # of wall clock for all; --budget of the command comes before it
    answer_share: BelowOne = 0.25  # of the budget, for the target's answers
    families: dict[str, FamilyTrials] = Field(default_factory=_default_families)
    engine: Engine | None = None  # that is to serve the draft: families that it does not take are left out. None: all are tried
    # Tokens a draft can propose; each is tried with every combination. As many as the target has, or more, and null are all
    draft_vocab_sizes: Annotated[list[PositiveInt | None], Field(min_length=1)] = [4096, 32768]
    max_length: PositiveInt = 1024  # tokens of a conversation in training; longer ones are cut at the end
    epochs: PositiveInt = 3  # passes of every trial over its conversations
    first_conversations: PositiveInt = 64  # of the first round of trials; each later round has `growth` times as many
    growth: Annotated[int, Field(ge=2)] = 2
    keep_share: BelowOne = 0.5  # of the trials of a round that go on to the next, the fastest ones; at least one does
    num_prompts: Annotated[int, Field(ge=2)] = 32  # held-out prompts decoded for tau, or as many as there are
    decode_batch_size: PositiveInt = 8  # held-out prompts decoded together for tau, which does not depend on it
    cost: CostConfig = CostConfig(num_speculative_tokens=5, batch_sizes=[1, 8], context_tokens=[128], repeats=2)
    batch_size: PositiveInt = 1  # requests served together: the trials are ranked by the speedup predicted for it
    batches_shown: Annotated[list[PositiveInt], Field(min_length=1)] = [1, 4, 16, 64]  # predicted besides
    hardware: HardwareConfig | None = None  # predict for this machine by its bandwidth and FLOP/s; None: for the one it runs on
    bootstrap_samples: PositiveInt = 200  # of prompts, for each interval
    seed: NonNegativeInt = 0  # of answers that are drawn
    output: str = "runs/advice"  # folder: advice.md, advice.json, recipe.yaml, data/, trials/

    def objections(self) -> Iterator[str]:
        if not self.families:
            yield "families is empty, so that there is nothing to try; give at least one by name"
        yield from unless_names("families", self.families)
        yield from unless_rising("batches_shown", self.batches_shown, "batch")
