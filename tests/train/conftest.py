"""A tiny target with conversations in its own greedy words, and the task of training a head on it."""

from pathlib import Path

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.training import HeadsConfig
from eval.decoder.decode import generate
from tests.support.caches import cache_job, conversation, run, write_rows
from tests.support.tiny_heads import HEADS
from train.launch import make_accelerator
from train.tasks.head import HeadTask


@pytest.fixture(scope="session")
def greedy_target(tiny_llama, as_target):
    """A target in float32, as targets are loaded; only for reading."""
    return as_target(tiny_llama(seed=1, dtype=torch.float32, layers=3).requires_grad_(False))


@pytest.fixture(scope="session")
def greedy_rows(greedy_target):
    """Sixteen conversations whose answers, of 8 to 19 tokens, are the target's greedy ones."""
    prompts = torch.randint(5, 64, (16, 6), generator=torch.Generator().manual_seed(0)).tolist()
    plain = DecodeConfig(num_speculative_tokens=0, max_new_tokens=19, batch_size=16)
    return [
        conversation(prompt, answer[: 8 + number % 12], f"p{number}")
        for number, (prompt, answer) in enumerate(zip(prompts, generate(greedy_target, prompts, plain), strict=True))
    ]


@pytest.fixture
def make_cache(tmp_path, greedy_target):
    """A function that makes a cache of conversations, which it writes to `train.jsonl`, and returns its folder."""

    def make(rows, target=greedy_target, folder="cache", **settings):
        data = write_rows(tmp_path / "train.jsonl", rows)
        run(cache_job(target, data, rows, tmp_path / folder, **{"max_length": 64} | settings))
        return tmp_path / folder

    return make


@pytest.fixture
def head_task(tmp_path, greedy_target, greedy_rows):
    """A function that makes the task of training a head of some kind; further settings go into its config."""

    def make(kind="eagle3", train=greedy_rows, held_out=greedy_rows[:5], target=greedy_target, **settings):
        decode = {"num_speculative_tokens": 3, "max_new_tokens": 12, "batch_size": 2}
        config = {
            "head": HEADS[kind] | settings.pop("head", {}),
            "schedule": {"batch_size": 4, "max_steps": 6, "mixed_precision": "no", "trackers": [], "log_every_steps": 3},
            "held_out": settings.pop("scored", {"num_prompts": 5, "decode": decode}),
            "sanity": {"learning_rate": 1e-2},
            "output": str(tmp_path / "run"),
        }
        config = HeadsConfig.model_validate(config | settings)
        return HeadTask(config, target, train, held_out, make_accelerator(config.schedule, Path(config.output)))

    return make
