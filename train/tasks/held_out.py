"""Evaluation on held-out prompts during training: they are decoded, and the best checkpoint is the one that decodes best."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from configs.runtime.redaction import mask_arguments
from configs.runtime.run_record import describe_git, describe_versions
from configs.schema.training import DistillConfig, HeadsConfig
from distill.dataset.conversations import Conversation, describe_data, index_of
from eval.decoder.decode import Request, check_decodable, decode
from eval.decoder.records import Generation
from eval.report.samples import spell_sample
from heads.artifact import read_training_prompts
from heads.frozen.loading import Target
from heads.frozen.processes import share_of, wait_patiently
from heads.metadata import METADATA_FILE
from heads.proposers.protocol import Proposer
from train.loop.checkpoints import Progress

NUM_SAMPLES = 4  # answers that are shown while a training goes on
TIMEOUT_SECONDS = 14_400  # how long processes wait for the one that decodes longest


class HeldOut:
    """The first `held_out.num_prompts` held-out conversations, whose prompts it must be possible to decode."""

    def __init__(
        self,
        config: DistillConfig | HeadsConfig,
        target: Target,
        conversations: Sequence[Conversation],
        accelerator: Accelerator,
    ) -> None:
        self.decode, self.target, self.accelerator = config.held_out.decode, target, accelerator
        self.share = share_of(target.group, accelerator.state)
        rows = conversations[: config.held_out.num_prompts]
        self.requests = [
            Request(
                prompt_id=f"{row.prompt_id}/{row.turn}",
                category=row.category,
                tokens=row.prompt_ids,
                media_prompt=row.media_prompt,
            )
            for row in rows
        ]
        self.user_texts = {each.prompt_id: row.user_text for each, row in zip(self.requests, rows, strict=True)}
        self.samples: list[dict[str, Any]] = []  # the first prompts' answers of the last evaluation, in the main process
        check_decodable(target, self.requests, self.decode)  # now, not at the end of the training

    def score(self, proposer: Proposer) -> dict[str, float]:
        """Decode the prompts, each process its share; return metrics over all of them."""
        settings = self.decode
        own = self.requests[self.share.number :: self.share.count]
        counts = torch.zeros(4, device=self.accelerator.device)
        first: list[Generation] = []
        for start in range(0, len(own), settings.batch_size):
            generations, _ = decode(self.target, own[start : start + settings.batch_size], settings, proposer)
            first += generations[: NUM_SAMPLES - len(first)]
            rounds = [round_ for generation in generations for round_ in generation.rounds]
            committed = sum(len(round_.committed) for round_ in rounds)
            accepted = sum(round_.num_accepted for round_ in rounds)
            drafted = sum(round_.num_drafted for round_ in rounds)
            counts += torch.tensor([committed, len(rounds), accepted, drafted], device=counts.device)
        if self.accelerator.is_main_process:
            shown = [each for each in first if each.rounds]
            self.samples[:] = [spell_sample(each, self.user_texts[each.prompt_id], self.target.spell) for each in shown]
        wait_patiently(TIMEOUT_SECONDS)  # some processes have fewer prompts, or none
        committed, num_rounds, accepted, drafted = self.accelerator.reduce(counts * self.share.writes, "sum").tolist()
        return {"tokens_per_target_step": committed / max(num_rounds, 1), "draft_token_yield": accepted / max(drafted, 1)}


def training_provenance(progress: Progress, metrics: dict[str, float], train: str) -> dict[str, Any]:
    """Return the provenance of a run for an artifact's metadata."""
    return {
        "data": describe_data(Path(train)),
        "command": mask_arguments(sys.orig_argv),
        "versions": describe_versions(),
        "git": describe_git(),
        "step": progress.step,
        "held_out": metrics,
    }


def training_prompts(train: Sequence[Conversation], start: Path | None) -> np.ndarray | None:
    """Return hashes of the prompts trained on, int64 `[N]`, with those of the folder that the run started from.

    None where that is an artifact that does not say, as none does that was published; a plain model counts as trained on none.
    """
    hashes = index_of(train).user_texts
    if start is None or not (start / METADATA_FILE).is_file():
        return hashes
    earlier = read_training_prompts(start)
    return None if earlier is None else np.concatenate([hashes, earlier])
