"""Evaluation on held-out prompts during training: what is decoded, and what the training forward predicts for it.

`HeldOut.score` decodes the prompts. `HeldOut.predict` takes the held-out answers as given, computes at every position how
many drafts in a row would be right, and walks through each answer by these numbers, a round at a time. Where the answers are
the target's greedy ones, that is exactly the number of tokens per target step that greedy decoding must yield, so a difference
is a fault in training or in drafting. The mean joint agreement plus one would not do: decoding passes easy positions in large
steps and meets hard ones more often. Sampled decoding and chains that a rule ends have no such prediction.
B batch, T positions, K depths, P positions of all rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from configs.runtime.redaction import mask_arguments
from configs.runtime.run_record import describe_git, describe_versions
from configs.schema.training import DistillConfig, HeadsConfig
from distill.dataset.batches import Example, collate
from distill.dataset.conversations import Conversation, describe_data, index_of
from distill.loss.objectives import HeadLoss, HeadObjective
from eval.decoder.decode import Request, check_decodable, decode
from heads.artifact import read_training_prompts
from heads.device import restored_random_state
from heads.frozen.hidden_states import TargetStates
from heads.frozen.loading import Target
from heads.frozen.processes import share_of, wait_patiently
from heads.metadata import METADATA_FILE
from heads.modules.interface import Batch
from heads.proposers.protocol import Proposer
from train.loop.checkpoints import Progress

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
        length = self.decode.max_new_tokens
        self.examples = [
            Example(row.prompt_ids + row.answer_ids[:length], len(row.prompt_ids), media_prompt=row.media_prompt)
            for row in rows
        ]
        check_decodable(target, self.requests, self.decode)  # now, not at the end of the training

    def score(self, proposer: Proposer) -> dict[str, float]:
        """Decode the prompts, each process its share; return metrics over all of them."""
        settings = self.decode
        own = self.requests[self.share.number :: self.share.count]
        counts = torch.zeros(4, device=self.accelerator.device)
        for start in range(0, len(own), settings.batch_size):
            generations, _ = decode(self.target, own[start : start + settings.batch_size], settings, proposer)
            rounds = [round_ for generation in generations for round_ in generation.rounds]
            committed = sum(len(round_.committed) for round_ in rounds)
            accepted = sum(round_.num_accepted for round_ in rounds)
            drafted = sum(round_.num_drafted for round_ in rounds)
            counts += torch.tensor([committed, len(rounds), accepted, drafted], device=counts.device)
        wait_patiently(TIMEOUT_SECONDS)  # some processes have fewer prompts, or none
        committed, num_rounds, accepted, drafted = self.accelerator.reduce(counts * self.share.writes, "sum").tolist()
        return {"tokens_per_target_step": committed / max(num_rounds, 1), "draft_token_yield": accepted / max(drafted, 1)}

    @torch.no_grad()
    def predict(self, objective: HeadObjective, states_of: Callable[[Batch], TargetStates]) -> dict[str, float]:
        """Return the predicted metrics by the unwrapped head under training, which keeps its mode.

        `predicted_tau` (greedy decoding without a stopping rule only), and for each draft k of a round the share of positions
        that agree at depth k given all before (`conditional_k`), and at all depths up to k (`joint_k`).
        """
        was_training = objective.training
        objective.eval()
        try:
            with restored_random_state(self.accelerator.device):  # training draws what it would without this
                torch.manual_seed(0)  # places that a block's head chooses at random are the same at each evaluation
                tokens, rounds, *by_depth = self._counts(objective, states_of).tolist()
        finally:
            objective.train(was_training)
        num_depths = len(by_depth) // 3
        columns = zip(*(by_depth[start : start + num_depths] for start in range(0, len(by_depth), num_depths)), strict=True)
        is_predicted = self.decode.temperature == 0 and self.decode.stopping is None
        metrics = {"predicted_tau": tokens / max(rounds, 1)} if is_predicted else {}
        for number, (agreed, reached, origins) in enumerate(list(columns)[: self.decode.num_speculative_tokens], start=1):
            if reached:
                metrics[f"conditional_{number}"] = agreed / reached
            metrics[f"joint_{number}"] = agreed / max(origins, 1)
        return metrics

    def _counts(self, objective: HeadObjective, states_of: Callable[[Batch], TargetStates]) -> Tensor:
        """Return tokens and rounds of the walks, then three counts by depth: all agree, all before agree, all positions."""
        own = self.examples[self.share.number :: self.share.count]
        # A process without conversations takes part in the sum all the same.
        examples, size = own or self.examples[:1], self.decode.batch_size
        batches = [examples[start : start + size] for start in range(0, len(examples), size)]
        counts = torch.stack([self._batch_counts(objective, states_of, batch) for batch in batches]).sum(0)
        return self.accelerator.reduce(counts if own and self.share.writes else torch.zeros_like(counts), "sum")

    def _batch_counts(
        self, objective: HeadObjective, states_of: Callable[[Batch], TargetStates], examples: Sequence[Example]
    ) -> Tensor:
        batch = collate(examples).to(self.accelerator.device)
        with self.accelerator.autocast():
            result: HeadLoss = objective(batch, states_of(batch))
        accepted_BT = result.accepted_P.view_as(batch.input_ids_BT).tolist()
        walks = [
            walk(accepted_T, example.answer_start, len(example.input_ids), self.decode.num_speculative_tokens)
            for accepted_T, example in zip(accepted_BT, examples, strict=True)
        ]
        by_depth = torch.cat([result.joint_agrees_K, result.reached_K, result.origins_K])
        return torch.cat([by_depth.new_tensor(walks).sum(0), by_depth])


def walk(accepted_T: Sequence[int], start: int, end: int, num_tokens: int) -> tuple[int, int]:
    """Return the number of tokens that greedy decoding commits after an answer's first one, and the number of rounds.

    `accepted_T`: by origin j, the drafts in a row that stay where x_{j+1} is pending; the answer lies at `start` to `end` - 1.
    """
    pending, rounds = start, 0
    while pending + 1 < end:
        pending += 1 + min(accepted_T[pending - 1], num_tokens)
        rounds += 1
    return end - 1 - start, rounds


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
