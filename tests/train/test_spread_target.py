"""Training on a target some of whose blocks lie on disk until they run: the run is that on the target loaded whole."""

from pathlib import Path

import pytest
import torch

from configs.runtime.files import sha256_of
from configs.schema.data import CacheConfig
from configs.schema.decoding import DecodeConfig
from configs.schema.learning import StudentConfig
from configs.schema.target import TargetConfig
from configs.schema.training import DistillConfig
from distill.cache.writer import CacheJob
from distill.dataset.batches import ConversationDataset, make_loader
from heads.target.hidden_states import blocks
from heads.target.loading import load_target
from train.launch import make_accelerator
from train.loop.loop import train
from train.tasks.draft import DraftTask


@pytest.fixture(scope="module")
def targets(tmp_path_factory, tiny_llama, tiny_tokenizer):
    """One target of three blocks, loaded whole, and with its second block on disk."""
    folder = tmp_path_factory.mktemp("target")
    tiny_llama(seed=1, dtype=torch.float32, layers=3).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    config = TargetConfig(name=str(folder), dtype="float32", device="cpu")
    return load_target(config), load_target(config.model_copy(update={"device_map": {"model.layers.1": "disk"}}))


def trained(make_task, target, rows):
    """Train 3 steps and decode held-out prompts; return the losses' outcome and the weights."""
    task = make_task(target)
    loader = make_loader(ConversationDataset(rows, 64), 4, seed=0)
    outcome = train(
        task,
        loader,
        task.config.optimizer,
        task.config.schedule,
        make_accelerator(task.config.schedule, Path(task.config.output)),
        Path(task.config.output),
        task.config.model_dump(mode="json"),
        {},
    )
    return outcome.best_score, {name: value for name, value in task.module.state_dict().items() if not name.startswith("_")}


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "medusa", "draft_lm"])
def test_training_on_a_spread_target_gives_the_weights_of_training_on_the_whole_one(
    tmp_path, targets, head_task, greedy_rows, kind
):
    def make_task(target):
        folder = str(tmp_path / str(target.spread_by is None))
        schedule = {"batch_size": 4, "max_steps": 3, "mixed_precision": "no", "trackers": [], "log_every_steps": 3}
        if kind != "draft_lm":
            torch.manual_seed(0)
            return head_task(kind, target=target, schedule=schedule, output=folder)
        decode = DecodeConfig(num_speculative_tokens=2, max_new_tokens=8).model_dump()
        config = DistillConfig.model_validate(
            {"student": StudentConfig(layers=[1, 2]).model_dump(), "schedule": schedule, "output": folder}
            | {"held_out": {"num_prompts": 3, "decode": decode}}
        )
        accelerator = make_accelerator(config.schedule, Path(config.output))
        return DraftTask(config, target, greedy_rows, greedy_rows[:3], accelerator)

    results = [trained(make_task, target, greedy_rows) for target in targets]
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert all(each.is_meta for each in blocks(targets[1].model)[1].parameters())


def test_a_cache_made_by_a_spread_target_holds_the_bytes_of_the_whole_ones(tmp_path, targets, greedy_rows):
    data = tmp_path / "train.jsonl"
    data.write_text("".join(row.to_line() for row in greedy_rows))
    shards = []
    for target in targets:
        output = tmp_path / str(target.spread_by is None)
        config = CacheConfig(data=str(data), output=str(output), max_length=64, taps=[1, 2, 3], dtype="float32", batch_size=4)
        job = CacheJob(target=target, conversations=greedy_rows, config=config, data_sha256=sha256_of(data))
        job.prepare()
        job.work(rank=0, num_processes=1)
        job.finish()
        shards.append({path.name: path.read_bytes() for path in output.glob("*.safetensors")})
    assert shards[0]
    assert shards[0] == shards[1]
