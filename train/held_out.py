"""The decoder on held-out prompts during training, and what an artifact says of its making. Shared by all tasks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator

from configs.provenance import describe_git, describe_versions, mask_arguments
from configs.schema import HeldOutDecodingConfig
from distill.conversations import Conversation
from distill.target import Target
from eval.decode import Request, check_decodable, decode
from heads.proposer import Proposer
from train.checkpoints import Progress


class HeldOutDecoding:
    """Decodes the first `config.num_prompts` held-out conversations' prompts.

    Args:
        config: how many, and how.
        target: the frozen target.
        conversations: the held-out side of the data.
        accelerator: shares the prompts over processes.

    Raises:
        InputError: a prompt cannot be decoded.
    """

    def __init__(
        self,
        config: HeldOutDecodingConfig,
        target: Target,
        conversations: Sequence[Conversation],
        accelerator: Accelerator,
    ) -> None:
        self.config, self.target, self.accelerator = config, target, accelerator
        self.requests = [
            Request(prompt_id=f"{row.prompt_id}/{row.turn}", category=row.category, tokens=row.prompt_ids)
            for row in conversations[: config.num_prompts]
        ]
        check_decodable(target, self.requests, config.decode)  # now, not at the end of the training

    def score(self, proposer: Proposer) -> dict[str, float]:
        """Decode this process's share of the prompts; add up counts over processes before any division."""
        settings = self.config.decode
        own = self.requests[self.accelerator.process_index :: self.accelerator.num_processes]
        counts = torch.zeros(4, device=self.accelerator.device)
        for start in range(0, len(own), settings.batch_size):
            generations, _ = decode(self.target, own[start : start + settings.batch_size], settings, proposer)
            rounds = [round_ for generation in generations for round_ in generation.rounds]
            committed = sum(len(round_.committed) for round_ in rounds)
            accepted = sum(round_.num_accepted for round_ in rounds)
            drafted = sum(len(round_.drafted) for round_ in rounds)
            counts += torch.tensor([committed, len(rounds), accepted, drafted], device=counts.device)
        committed, num_rounds, accepted, drafted = self.accelerator.reduce(counts, "sum").tolist()
        return {"tokens_per_target_step": committed / max(num_rounds, 1), "draft_token_yield": accepted / max(drafted, 1)}


def training_provenance(progress: Progress, metrics: dict[str, float]) -> dict[str, Any]:
    """Return what an artifact's metadata says of the run that made it."""
    return {
        "command": mask_arguments(sys.orig_argv),
        "versions": describe_versions(),
        "git": describe_git(),
        "step": progress.step,
        "held_out": metrics,
    }
