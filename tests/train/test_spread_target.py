"""Training on a target some of whose blocks lie on disk until they run: the run is that on the target loaded whole."""

import pytest
import torch

from configs.schema.target import TargetConfig
from heads.frozen.hidden_states import blocks
from heads.frozen.loading import load_target
from tests.support.training_runs import distill_config, draft_task, train_task


@pytest.fixture(scope="module")
def targets(tmp_path_factory, tiny_llama, tiny_tokenizer):
    """One target of three blocks, loaded whole, and with its second block on disk."""
    folder = tmp_path_factory.mktemp("target")
    tiny_llama(seed=1, dtype=torch.float32, layers=3).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    config = TargetConfig(name=str(folder), dtype="float32", device="cpu")
    return load_target(config), load_target(config.model_copy(update={"device_map": {"model.layers.1": "disk"}}))


@pytest.mark.parametrize(("kind", "settings"), [("eagle3", {"init_block": 1}), ("mtp", {}), ("draft_lm", {"layers": [1, 2]})])
def test_training_on_a_spread_target_gives_the_weights_of_training_on_the_whole_one(
    tmp_path, targets, head_task, greedy_rows, kind, settings
):
    results = []
    for target in targets:
        folder = tmp_path / str(target.spread_by is None)
        torch.manual_seed(0)
        if kind == "draft_lm":
            task = draft_task(distill_config(folder, settings, max_steps=3), target, greedy_rows)
        else:
            schedule = {"batch_size": 4, "max_steps": 3, "mixed_precision": "no", "trackers": []}
            task = head_task(kind, target=target, head=settings, schedule=schedule, output=str(folder))
        results.append(train_task(task, greedy_rows))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert all(each.is_meta for each in blocks(targets[1].model)[1].parameters())
