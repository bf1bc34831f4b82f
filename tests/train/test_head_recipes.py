"""Recipes of head families, on a tiny target: each loads, trains two steps and is scored."""

import math
from pathlib import Path

import pytest

from configs.runtime.files import CHECKOUT
from configs.runtime.loading import load_config
from configs.schema.training import HeadsConfig
from tests.support.training_runs import train_task
from train.launch import make_accelerator
from train.resolve import resolve
from train.tasks.head import HeadTask

# In place of what suits targets of more blocks and tokens.
SIZES = {"taps": [0, 1, 2], "draft_vocab_size": 30, "mask_token_id": 0}


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle3", "mtp", "peagle", "dflash"])
def test_a_recipe_trains(kind, greedy_target, greedy_rows, tmp_path):
    recipe = load_config(HeadsConfig, CHECKOUT / "configs" / "heads" / f"{kind}.yaml").model_dump(mode="json")
    head = recipe["head"]
    head |= {name: size for name, size in SIZES.items() if name in head}
    recipe["schedule"] |= {"max_steps": 2, "batch_size": 4, "mixed_precision": "no", "trackers": []}
    recipe["held_out"] |= {"num_prompts": 2, "decode": recipe["held_out"]["decode"] | {"max_new_tokens": 8}}
    config = HeadsConfig.model_validate(recipe | {"output": str(tmp_path)})
    config = resolve(config, greedy_target.model, greedy_rows)
    accelerator = make_accelerator(config.schedule, Path(config.output))
    task = HeadTask(config, greedy_target, greedy_rows, greedy_rows[:2], accelerator)
    _, losses = train_task(task, greedy_rows)
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))
    assert (tmp_path / "artifact" / "draftsmith.json").is_file()
