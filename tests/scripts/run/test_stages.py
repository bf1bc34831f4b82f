"""What each stage of a run is told: its config, or its arguments."""

from configs.runtime.loading import load_config
from configs.schema.base import dotted
from configs.schema.commands.running import RunConfig
from configs.schema.evaluation import SuiteConfig
from configs.schema.training import training_schema
from scripts.run import stages

TARGET = {"target.name": "ann/model", "target.dtype": "float32"}
SUITE = SuiteConfig(name="house", path="eval/suites/house64.jsonl", on_too_long="truncate")
ASKED = {
    "target": {"name": "ann/model", "dtype": "float32"},
    "prompts": {"source": "file", "path": "asked.jsonl", "num_prompts": 90},
    "data": {"answers.max_new_tokens": 64},
    "cache": {"taps": [1, 2], "max_length": 300},
    "train": {"schedule.epochs": 4},
    "eval": {"suite.num_prompts": 8},
    "output": "runs/mine",
}
TOLD = {
    "data": {
        **TARGET,
        "prompts.source": "file",
        "prompts.path": "asked.jsonl",
        "prompts.num_prompts": 90,
        "answers.max_new_tokens": 64,
        "output": "runs/mine/data",
    },
    "cache": {**TARGET, "data": "runs/mine/data/train.jsonl", "taps": [1, 2], "max_length": 300, "output": "runs/mine/cache"},
    "train": {
        **TARGET,
        "data.train": "runs/mine/data/train.jsonl",
        "data.held_out": "runs/mine/data/held_out.jsonl",
        "data.cache": "runs/mine/cache",
        "schedule.epochs": 4,
        "output": "runs/mine/train",
    },
    "eval": {
        **TARGET,
        "draft": "runs/mine/train/artifact",
        "suite.name": "home",
        "suite.path": "runs/mine/data/held_out.jsonl",
        "suite.num_prompts": 8,
        "suites": [SUITE.model_dump(mode="json")],
        "baselines": ["prompt_lookup", "suffix_lookup"],
        "lookup_answers": "runs/mine/data/train.jsonl",
        "output": "runs/mine/eval",
        "overwrite": True,
    },
    "gate": {},
}


def told(run, stage):
    """Return what a stage's config has that its command's defaults, or the recipe, do not have."""
    config = stages.stage_config(run, stage)
    recipe = {"train": run.recipe, "gate": run.gate}.get(stage)
    usual = load_config(training_schema(recipe) if stage == "train" else type(config), recipe)
    before = dict(dotted(usual.model_dump(mode="json"), takes_all=True))
    now = dict(dotted(config.model_dump(mode="json"), takes_all=True))
    return {key: value for key, value in now.items() if key not in before or before[key] != value}


def test_every_stage_config_is_what_the_run_says_and_no_more():
    run = RunConfig.model_validate(ASKED)
    assert {stage: told(run, stage) for stage in TOLD} == TOLD
    assert [stages.stage_config(run, stage) for stage in ("export", "check")] == [None, None]
