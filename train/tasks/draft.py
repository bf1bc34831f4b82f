"""Distilling a draft LM as a `train.loop.loop.Task`: its loss, its score on held-out prompts, its artifact."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.runtime.errors import InputError
from configs.schema.target import TargetConfig
from configs.schema.training import DistillConfig
from distill.cache.reader import TargetCache
from distill.dataset.conversations import Conversation
from distill.loss.objectives import DraftObjective
from distill.signals import SignalSource, TargetSignals
from distill.student.init import initial_draft, merge_adapters
from distill.student.on_policy import Rewriter
from heads.artifact import save_draft_lm
from heads.device import restored_random_state
from heads.frozen.hidden_states import blocks
from heads.frozen.identity import locate
from heads.frozen.loading import Target, move
from heads.frozen.weights import recast
from heads.inference.model_checks import check_keeps_apart
from heads.metadata import Metadata
from heads.modules.interface import Batch
from heads.modules.layers import checkpoint_activations
from heads.proposers.draft_lm import DraftLM
from heads.vocabulary import keep_head_rows
from train.loop.checkpoints import Progress
from train.loop.loop import BatchLoss
from train.loop.telemetry import StepClock
from train.resolve import choose_vocabulary
from train.tasks.held_out import HeldOut, training_prompts, training_provenance


class DraftTask:
    """A draft LM under training (`train.loop.loop.Task`); with a cache the target runs on no batch of the training.

    Raises:
        InputError: the draft cannot be made, a held-out prompt cannot be decoded, or a model cannot be trained on packed rows.
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
        self.config, self.target, self.accelerator = config, target, accelerator
        self.clock = StepClock(accelerator.device)
        self.vocabulary = choose_vocabulary(config.student.draft_vocab_size, target, train)
        draft = initial_draft(config.student, target)
        if config.data.packing:
            for model in (draft, *([target.model] if cache is None else [])):
                check_keeps_apart(model)
        if config.schedule.activation_checkpointing:
            checkpoint_activations(draft)
        self.module: nn.Module = DraftObjective(draft, target, config.loss, self.vocabulary)
        self.rewriter = Rewriter(config, target) if config.policy.on_policy else None
        self.drafts_while_training = self.rewriter is not None
        self.source = SignalSource(target, cache=cache, known_ahead=self.rewriter is None)
        path = config.student.path
        self.training_prompts = training_prompts(train, None if path is None else locate(TargetConfig(name=path)))
        self.held_out = HeldOut(config, target, held_out, accelerator)

    def copy_of_module(self) -> nn.Module:
        return copy.deepcopy(self.module, {id(self.target): self.target})

    def units(self) -> Sequence[nn.Module]:
        """Return the draft's blocks."""
        return list(blocks(cast(DraftObjective, self.module).draft))

    def read_from_outside(self) -> Sequence[nn.Parameter]:
        """Return the output head's weights: the loss applies them a chunk at a time, or runs a head that is not linear."""
        head = cast(DraftObjective, self.module).draft.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise InputError(
                f"DeepSpeed's ZeRO stage 3 can split drafts with a linear output head only, got {type(head).__name__}; set "
                "zero_stage to 1 or 2"
            )
        return list(head.parameters())

    def prepare(self, module: nn.Module, batches: list[Batch], step: int) -> tuple[list[Batch], Mapping[str, Tensor]]:
        """Let the draft answer a share of the rows where the policy asks for it."""
        if self.rewriter is None:
            return batches, {}
        selections = [
            self.rewriter.choose(len(batch.input_ids_BT), step=step, micro_batch=number) for number, batch in enumerate(batches)
        ]
        num_written = 0
        if any(selection.rows for selection in selections):
            draft = self._proposer(module)
            pairs = [self.rewriter.rewrite(*pair, draft) for pair in zip(batches, selections, strict=True)]
            batches, num_written = [batch for batch, _ in pairs], sum(count for _, count in pairs)
        return batches, {"rewritten_share": torch.tensor(num_written, device=self.accelerator.device)}

    def loss(self, module: nn.Module, batch: Batch, signals: TargetSignals) -> BatchLoss:
        result = module(batch, signals.states.final_BTE)
        sums = {
            "loss": result.values_N.sum(),
            "acceptance": result.acceptance_N.sum(),
            "top1_agreement": result.top1_agrees_N.sum(),
        }
        return BatchLoss(loss=result.loss, sums=sums)

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Decode held-out prompts with the draft as it stands."""
        return self.held_out.score(self._proposer(module))

    def save(self, module: nn.Module, progress: Progress, metrics: dict[str, float]) -> None:
        """Write the draft, in the target's dtype, as the run's artifact."""
        metadata = Metadata(
            kind="draft_lm",
            target=self.target.identity.to_dict(),
            draft_vocab_size=self.target.vocab_size if self.vocabulary is None else len(self.vocabulary),
            draft_vocabulary="target" if self.vocabulary is None else "reduced",
            num_speculative_tokens=self.config.num_speculative_tokens,
            training=self.config.model_dump(mode="json"),
            provenance=training_provenance(progress, metrics, self.config.data.train),
        )
        artifact = Path(self.config.output) / "artifact"
        save_draft_lm(artifact, self._served(module), self.target.tokenizer, metadata, self.vocabulary, self.training_prompts)

    def _proposer(self, module: nn.Module) -> DraftLM:
        served = self._served(module)
        if self.vocabulary is not None:
            # The new head is made with random weights before it gets its own; the random state of training is restored.
            with restored_random_state(served.device):
                keep_head_rows(served, self.vocabulary)
        return DraftLM(served, self.target.vocab_size, self.vocabulary)

    def _served(self, module: nn.Module) -> PreTrainedModel:
        """Return a copy of the draft as it will be served: adapters merged, in the target's dtype, without gradients."""
        assert isinstance(module, DraftObjective)
        served = copy.deepcopy(module.draft).eval()
        merge_adapters(served)
        return move(recast(served, self.target.model.dtype), self.target.device).eval().requires_grad_(False)
