"""The trials: every combination of a family's values and of the draft vocabularies, as a recipe."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from configs.runtime.errors import ConfigError
from configs.schema.base import Value
from configs.schema.commands.advising import AdviceConfig, FamilyTrials
from configs.schema.training import DistillConfig, training_schema
from heads.formats.exporting.table import FORMS
from scripts.advice.trained_runs import Recipe, TrainingRun, in_own_folder, load_changed

VOCABULARY = "draft_vocab_size"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A draft to try: its family, what tells it from the family's others, and its recipe on the user's target and prompts."""

    family: str
    settings: Mapping[str, Value]  # by the last part of their keys
    recipe: Recipe

    @property
    def kind(self) -> str:
        """Of its artifact."""
        return "draft_lm" if isinstance(self.recipe, DistillConfig) else self.recipe.head.kind

    @property
    def name(self) -> str:
        return ", ".join([self.family, *(f"{key} {'all' if value is None else value}" for key, value in self.settings.items())])

    def run(self, num_conversations: int, folder: Path) -> TrainingRun:
        """Return its training on so many of the conversations."""
        data = self.recipe.data.model_copy(update={"num_conversations": num_conversations})
        recipe = self.recipe.model_copy(update={"data": data})
        return TrainingRun(name=self.name, recipe=in_own_folder(recipe, folder, re.sub(r"[^A-Za-z0-9]+", "-", self.name)))


def make_candidates(config: AdviceConfig, data: Path, vocab_size: int) -> list[Candidate]:
    """Return every trial whose draft the engine takes that is to serve it, the families' by turns, so that none is left out."""
    sizes = dict.fromkeys(size if size is not None and size < vocab_size else None for size in config.draft_vocab_sizes)
    candidates = [
        candidate
        for size in sizes
        for name, family in config.families.items()
        for candidate in _of_family(config, name, family, size, data)
    ]
    if config.engine is None:
        return candidates
    taken = FORMS[config.engine]
    if not (served := [each for each in candidates if each.kind in taken]):
        kinds = ", ".join(dict.fromkeys(each.kind for each in candidates))
        raise ConfigError(
            f"engine: {config.engine} takes {', '.join(taken)}, and the families are of kind {kinds}; add one to families"
        )
    return served


def full_recipe(candidate: Candidate, config: AdviceConfig, drafts: int, num_held_out: int) -> Recipe:
    """Return the recipe of the whole training: the trial's, with the schedule of the recipe it was made of."""
    family = config.families[candidate.family]
    values = candidate.recipe.model_dump(mode="json")
    values |= {
        "schedule": load_changed(training_schema(family.recipe), family.recipe, {}, "").schedule.model_dump(mode="json"),
        "num_speculative_tokens": drafts,
        "output": str(Path(config.output) / "train"),
    }
    values["held_out"] |= {"num_prompts": min(16, num_held_out)}
    values["held_out"]["decode"] |= {"num_speculative_tokens": drafts, "max_new_tokens": config.answers.max_new_tokens}
    if "sanity" in values:
        values["sanity"]["enabled"] = True
    return type(candidate.recipe).model_validate(values)


def _of_family(config: AdviceConfig, name: str, family: FamilyTrials, size: int | None, data: Path) -> Iterator[Candidate]:
    schema = training_schema(family.recipe)
    section = "student" if schema is DistillConfig else "head"
    for values in product(*family.values.values()):
        changes = dict(zip(family.values, values, strict=True))
        shown = {key.rpartition(".")[2]: value for key, value in changes.items() if len(family.values[key]) > 1}
        recipe = load_changed(schema, family.recipe, {**changes, f"{section}.{VOCABULARY}": size}, f"families.{name}.values")
        yield Candidate(family=name, settings={**shown, VOCABULARY: size}, recipe=_as_trial(recipe, config, data))


def _as_trial(recipe: Recipe, config: AdviceConfig, data: Path) -> Recipe:
    """Return a recipe on the user's target and data, without what a short training has no use for."""
    values = recipe.model_dump(mode="json")
    values["target"] = config.target.model_dump(mode="json")
    values["data"] |= {"train": str(data / "train.jsonl"), "held_out": str(data / "held_out.jsonl")}
    values["data"] |= {"cache": None, "max_length": config.max_length}
    values["schedule"] |= {"epochs": config.epochs, "max_steps": None, "trackers": []}
    values["schedule"] |= {"eval_every_steps": None, "checkpoint_every_steps": None}  # so that no prompt chooses a checkpoint
    values["held_out"] |= {"num_prompts": 1}
    values["held_out"]["decode"] |= {"max_new_tokens": 8}
    if "sanity" in values:
        values |= {"sanity": {**values["sanity"], "enabled": False}, "init": None}
    return type(recipe).model_validate(values)
