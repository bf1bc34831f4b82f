"""Distilling a draft LM as a task of the training loop: its loss, its score on held-out prompts, its artifact."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.provenance import describe_git, describe_versions, mask_arguments
from configs.schema import DistillConfig
from distill.batches import Batch
from distill.conversations import Conversation
from distill.draft_init import initial_draft
from distill.objective import DraftObjective, target_hidden
from distill.target import Target, move
from eval.decode import Request, decode
from heads.artifact import Metadata, save_draft_lm
from heads.draft_lm import DraftLM
from train.checkpoints import Progress
from train.loop import BatchLoss


class DraftTask:
    """See the module's docstring; the interface is `train.loop.Task`.

    Args:
        config: the run's config.
        target: the frozen target.
        held_out: conversations to decode on; the first `held_out.num_prompts` are used.
        accelerator: shares the held-out prompts over processes.
    """

    def __init__(
        self, config: DistillConfig, target: Target, held_out: Sequence[Conversation], accelerator: Accelerator
    ) -> None:
        self.config, self.target, self.accelerator = config, target, accelerator
        self.module: nn.Module = DraftObjective(initial_draft(config.student, target), target, config.loss)
        self.requests = [
            Request(prompt_id=f"{row.prompt_id}/{row.turn}", category=row.category, tokens=row.prompt_ids)
            for row in held_out[: config.held_out.num_prompts]
        ]

    def loss(self, module: nn.Module, batch: Batch, num_labels: Tensor, world_size: int) -> BatchLoss:
        hidden_BTE = target_hidden(self.target, batch)
        result = module(batch.input_ids_BT, batch.loss_mask_BT, hidden_BTE, num_labels, world_size)
        sums = {
            "loss": result.values_N.sum(),
            "acceptance": result.acceptance_N.sum(),
            "top1_agreement": result.top1_agrees_N.sum(),
        }
        return BatchLoss(loss=result.loss, sums=sums)

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Decode this process's share of the held-out prompts with the draft as it stands; add up counts over processes."""
        proposer = DraftLM(self._served(module), self.target.vocab_size)
        settings = self.config.held_out.decode
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

    def save(self, module: nn.Module, progress: Progress, metrics: dict[str, float]) -> None:
        """Write the draft, in the target's dtype, as the run's artifact."""
        metadata = Metadata(
            kind="draft_lm",
            target=self.target.identity.to_dict(),
            draft_vocab_size=self.target.vocab_size,
            num_speculative_tokens=self.config.num_speculative_tokens,
            training=self.config.model_dump(mode="json"),
            provenance=self._provenance(progress, metrics),
        )
        save_draft_lm(Path(self.config.output) / "artifact", self._served(module), self.target.tokenizer, metadata)

    def _served(self, module: nn.Module) -> PreTrainedModel:
        """Return a copy of the draft as it will be served: in the target's dtype, without gradients."""
        assert isinstance(module, DraftObjective)
        served = move(copy.deepcopy(module.draft), self.target.device, self.target.model.dtype)
        return served.eval().requires_grad_(False)

    def _provenance(self, progress: Progress, metrics: dict[str, float]) -> dict[str, Any]:
        return {
            "command": mask_arguments(sys.orig_argv),
            "versions": describe_versions(),
            "git": describe_git(),
            "step": progress.step,
            "held_out": metrics,
        }
