"""Distilling a draft LM as a task of the training loop: its loss, its score on held-out prompts, its artifact."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.learning import StudentConfig
from configs.provenance import describe_git, describe_versions, mask_arguments
from configs.schema import DistillConfig
from distill.adapters import merge_adapters
from distill.batches import Batch, ConversationDataset
from distill.cache import TargetCache
from distill.conversations import Conversation
from distill.draft_init import initial_draft
from distill.layer_choice import choose_layers
from distill.losses import SparseTarget
from distill.objective import DraftObjective, target_hidden
from distill.target import Target, move
from distill.vocabulary_choice import most_frequent_answer_tokens
from eval.decode import Request, check_decodable, decode
from heads.artifact import Metadata, save_draft_lm
from heads.draft_lm import DraftLM
from heads.draft_vocabulary import keep_head_rows
from train.checkpoints import Progress
from train.loop import BatchLoss


class DraftTask:
    """See the module's docstring; the interface is `train.loop.Task`.

    Args:
        config: the run's config.
        target: the frozen target.
        train: conversations trained on; layers are searched and a reduced draft vocabulary is chosen by them.
        held_out: conversations to decode on; the first `held_out.num_prompts` are used.
        accelerator: shares the held-out prompts over processes.
        cache: what the target said about `train`; None: the target runs on every batch.

    Raises:
        InputError: the draft cannot be made, or a held-out prompt cannot be decoded.
    """

    def __init__(
        self,
        config: DistillConfig,
        target: Target,
        train: Sequence[Conversation],
        held_out: Sequence[Conversation],
        accelerator: Accelerator,
        cache: TargetCache | None = None,
    ) -> None:
        student = _with_layers(config, target, train)
        self.config = config.model_copy(update={"student": student})
        self.target, self.accelerator = target, accelerator
        online: Callable[[Batch], Tensor | SparseTarget] = partial(target_hidden, target)
        self.signal = online if cache is None else cache.signal
        size = student.draft_vocab_size
        self.vocabulary = None if size is None else most_frequent_answer_tokens(train, size, target)
        draft = initial_draft(student, target)
        self.module: nn.Module = DraftObjective(draft, target, config.loss, self.vocabulary)
        self.requests = [
            Request(prompt_id=f"{row.prompt_id}/{row.turn}", category=row.category, tokens=row.prompt_ids)
            for row in held_out[: config.held_out.num_prompts]
        ]
        check_decodable(target, self.requests)  # now, not at the end of the training

    def loss(self, module: nn.Module, batch: Batch, num_labels: Tensor, world_size: int) -> BatchLoss:
        result = module(batch.input_ids_BT, batch.loss_mask_BT, self.signal(batch), num_labels, world_size)
        sums = {
            "loss": result.values_N.sum(),
            "acceptance": result.acceptance_N.sum(),
            "top1_agreement": result.top1_agrees_N.sum(),
        }
        return BatchLoss(loss=result.loss, sums=sums)

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Decode this process's share of the held-out prompts with the draft as it stands; add up counts over processes."""
        served = self._served(module)
        if self.vocabulary is not None:
            keep_head_rows(served, self.vocabulary)
        proposer = DraftLM(served, self.target.vocab_size, self.vocabulary)
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
            draft_vocab_size=self.target.vocab_size if self.vocabulary is None else len(self.vocabulary),
            draft_vocabulary="target" if self.vocabulary is None else "reduced",
            num_speculative_tokens=self.config.num_speculative_tokens,
            training=self.config.model_dump(mode="json"),
            provenance=self._provenance(progress, metrics),
        )
        artifact = Path(self.config.output) / "artifact"
        save_draft_lm(artifact, self._served(module), self.target.tokenizer, metadata, self.vocabulary)

    def _served(self, module: nn.Module) -> PreTrainedModel:
        """Return a copy of the draft as it will be served: adapters merged, in the target's dtype, without gradients."""
        assert isinstance(module, DraftObjective)
        served = copy.deepcopy(module.draft).eval()
        merge_adapters(served)
        return move(served, self.target.device, self.target.model.dtype).requires_grad_(False)

    def _provenance(self, progress: Progress, metrics: dict[str, float]) -> dict[str, Any]:
        return {
            "command": mask_arguments(sys.orig_argv),
            "versions": describe_versions(),
            "git": describe_git(),
            "step": progress.step,
            "held_out": metrics,
        }


def _with_layers(config: DistillConfig, target: Target, train: Sequence[Conversation]) -> StudentConfig:
    """Return the student's config with the chosen layers in place of the way to choose them, the same in all processes."""
    student = config.student
    if student.layer_choice is None:
        return student
    calibration = ConversationDataset(train, config.data.max_length).examples if student.layer_choice == "searched" else []
    (layers,) = broadcast_object_list([choose_layers(student, target, calibration)])
    return student.model_copy(update={"layers": layers, "layer_choice": None, "num_layers": None})
