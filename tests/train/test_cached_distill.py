"""Training from a target cache: the same run as online, without a single forward of the target."""

from pathlib import Path

import pytest
import torch

from configs.runtime.errors import ConfigError, InputError
from configs.runtime.files import sha256_of
from configs.schema.data import CacheConfig
from configs.schema.decoding import DecodeConfig
from configs.schema.training import DistillConfig
from distill.cache.writer import CacheJob
from distill.dataset.batches import ConversationDataset
from heads.inference.model_checks import check_rolls_back
from tests.support.training_runs import conversation, train_task
from train.launch import make_accelerator, open_training_cache
from train.tasks.draft import DraftTask

MAX_LENGTH = 64


@pytest.fixture
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1, dtype=torch.float32, layers=3))


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    answers = torch.randint(5, 64, (16, 20), generator=generator).tolist()
    return [conversation(number, ids[:5], ids[5 : 8 + number % 12]) for number, ids in enumerate(answers)]


@pytest.fixture
def make_cache(tmp_path, target, rows):
    """A function that makes a cache of the rows and returns its folder."""
    data = tmp_path / "train.jsonl"
    data.write_text("".join(row.to_line() for row in rows))

    def make(**settings):
        config = CacheConfig(data=str(data), output=str(tmp_path / "cache"), max_length=MAX_LENGTH, batch_size=3, **settings)
        job = CacheJob(target=target, conversations=rows, config=config, data_sha256=sha256_of(data))
        job.prepare()
        job.work(rank=0, num_processes=1)
        job.finish()
        return tmp_path / "cache"

    return make


def config_for(folder, cache, **settings):
    return DistillConfig(
        data={"train": str(folder / "train.jsonl"), "max_length": MAX_LENGTH, "cache": cache and str(cache)},
        student={"layers": [0, 2]},
        schedule={"batch_size": 4, "max_steps": 6, "mixed_precision": "no", "trackers": [], "log_every_steps": 1},
        held_out={"num_prompts": 2, "decode": DecodeConfig(max_new_tokens=4)},
        output=str(folder / ("cached" if cache else "online")),
        **settings,
    )


def run(config, target, rows):
    """Train as configured; return the weights at the end and the loss of each batch on the way."""
    accelerator = make_accelerator(config.schedule, Path(config.output))
    dataset = ConversationDataset(rows, MAX_LENGTH)
    task = DraftTask(config, target, rows, rows[:2], accelerator, open_training_cache(config, dataset, target))
    return train_task(task, rows, max_length=MAX_LENGTH)


@pytest.mark.parametrize(
    "kept", [{"dtype": "float32"}, {"kind": "top_k", "k": 64, "dtype": "float32"}], ids=lambda x: x.get("kind")
)
def test_a_run_from_the_cache_is_the_run_online(tmp_path, target, rows, make_cache, kept):
    online, online_losses = run(config_for(tmp_path, None), target, rows)
    cached, cached_losses = run(config_for(tmp_path, make_cache(**kept)), target, rows)
    assert len(set(online_losses)) == 6
    assert cached_losses == pytest.approx(online_losses, rel=1e-5)
    for name, tensor in online.items():
        torch.testing.assert_close(cached[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_the_target_is_never_run_on_a_batch(tmp_path, target, rows, make_cache, monkeypatch):
    cache = make_cache()
    check_rolls_back(target.model)  # by a probe, which is no batch
    monkeypatch.setattr("train.tasks.draft.target_hidden", lambda *_: pytest.fail("the target was run"))
    monkeypatch.setattr(DraftTask, "evaluate", lambda *_: {"tokens_per_target_step": 1.0})
    target.model.model.forward = lambda *_, **__: pytest.fail("the target was run")
    _, losses = run(config_for(tmp_path, cache), target, rows)
    assert len(losses) == 6


def test_a_cache_that_does_not_fit_is_refused_before_training(tmp_path, target, rows, make_cache):
    cache = make_cache(kind="top_k", k=4)
    dataset = ConversationDataset(rows, MAX_LENGTH)
    with pytest.raises(ConfigError, match=r"loss\.temperature"):
        open_training_cache(config_for(tmp_path, cache, loss={"temperature": 2.0}), dataset, target)
    (tmp_path / "train.jsonl").write_text("changed")
    with pytest.raises(InputError, match="is not that file"):
        open_training_cache(config_for(tmp_path, cache), dataset, target)
    assert open_training_cache(config_for(tmp_path, None), dataset, target) is None
