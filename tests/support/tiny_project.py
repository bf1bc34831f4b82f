"""A tiny target on disk, its data, and configs of runs that take a second and are bit-exact on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from configs.schema.data import CacheConfig, DataConfig
from configs.schema.training import DistillConfig, HeadsConfig
from distill.generation.make_dataset import make_dataset
from tests.conftest import make_llama, make_tokenizer

NUM_PROMPTS = 48
STEPS, EVERY = 12, 3  # optimiser steps of a run, and between checkpoints


class TinyProject:
    def __init__(self, folder: Path, num_prompts: int = NUM_PROMPTS) -> None:
        self.folder, self.num_prompts = folder, num_prompts
        self.target = {"name": str(folder / "target"), "dtype": "float32", "device": "cpu"}

    def create(self) -> None:
        model = make_llama(layers=3, dtype=torch.float32, spread=4.0)
        model.config.eos_token_id = model.generation_config.eos_token_id = 1
        model.save_pretrained(self.folder / "target")
        make_tokenizer().save_pretrained(self.folder / "target")
        rows = [{"question_id": n, "turns": [f"w{n % 60} w{(7 * n) % 59} w{(3 * n) % 50}"]} for n in range(self.num_prompts)]
        (self.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        make_dataset(self.data(self.folder / "data"))

    def data(self, output: Path) -> DataConfig:
        return DataConfig.model_validate(
            {
                "target": self.target,
                "prompts": {"source": "file", "path": str(self.folder / "prompts.jsonl"), "num_prompts": self.num_prompts},
                "answers": {"max_new_tokens": 16, "batch_size": 4, "temperature": 1.0},
                "held_out_share": 0.2,
                "output": str(output),
            }
        )

    def cache(self, output: Path) -> CacheConfig:
        return CacheConfig.model_validate(
            {
                "target": self.target,
                "data": str(self.folder / "data" / "train.jsonl"),
                "max_length": 64,
                "shard_megabytes": 0.005,
                "output": str(output),
            }
        )

    def distill(self, output: Path, **schedule: object) -> DistillConfig:
        return DistillConfig.model_validate(
            {"student": {"layers": [0]}, "optimizer": {"learning_rate": 3e-3}, **self._training(output, schedule)}
        )

    def heads(self, output: Path, **schedule: object) -> HeadsConfig:
        head = {"kind": "peagle", "num_depths": 4, "num_layers": 1, "keep_share": 0.5, "taps": [0, 1, 2]}
        return HeadsConfig.model_validate({"head": head, "sanity": {"enabled": False}, **self._training(output, schedule)})

    def _training(self, output: Path, schedule: dict[str, object]) -> dict[str, object]:
        data = self.folder / "data"
        lengths = {"batch_size": 4, "max_steps": STEPS, "eval_every_steps": EVERY, "checkpoint_every_steps": EVERY}
        quiet = {"mixed_precision": "no", "trackers": [], "log_every_steps": 1}
        return {
            "target": self.target,
            "data": {"train": str(data / "train.jsonl"), "held_out": str(data / "held_out.jsonl"), "max_length": 64},
            "schedule": lengths | quiet | schedule,
            "held_out": {"num_prompts": 2, "decode": {"max_new_tokens": 6, "num_speculative_tokens": 2}},
            "output": str(output),
        }
