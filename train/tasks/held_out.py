"""What decoding would yield if the head drafted as it was trained: held-out answers gone through without decoding them.

The objective looks at every place of the answers at once, the text being given, and says how many drafts in a row would be
right from there. Walking through each answer by these numbers, a round at a time, gives the tokens per target step that
greedy decoding must yield, exactly, where training and decoding do the same thing and the answers are the target's greedy
ones. So a gap to what is decoded is a finding. One plus the joint agreements would not do: they are means over all places,
while decoding passes easy places in large steps and stands at hard ones more often.

Left out on purpose: sampled decoding, of which the agreement of the likeliest tokens says nothing.
B batch, T positions, K depths.


The decoder on held-out prompts during training, and what an artifact says of its making. Shared by all tasks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from configs.runtime.redaction import mask_arguments
from configs.runtime.run_record import describe_git, describe_versions
from configs.schema.training import HeldOutDecodingConfig
from distill.dataset.batches import Example, collate
from distill.dataset.conversations import Conversation
from distill.loss.head_objective import HeadLoss, HeadObjective
from eval.decoder.decode import Request, check_decodable, decode
from heads.modules.interface import Batch
from heads.proposers.protocol import Proposer
from heads.target.hidden_states import TargetStates
from heads.target.loading import Target
from train.loop.checkpoints import Progress


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


class HeldOutPrediction:
    """Looks at the conversations whose prompts `train.tasks.held_out.HeldOutDecoding` decodes, as far as it decodes them.

    Args:
        config: how many conversations, and how they are decoded.
        conversations: the held-out side of the data.
        accelerator: shares them over processes.
    """

    def __init__(self, config: HeldOutDecodingConfig, conversations: Sequence[Conversation], accelerator: Accelerator) -> None:
        self.decode, self.accelerator = config.decode, accelerator
        self.examples = [
            Example(row.prompt_ids + row.answer_ids[: self.decode.max_new_tokens], len(row.prompt_ids))
            for row in conversations[: config.num_prompts]
        ]

    @torch.no_grad()
    def score(self, objective: HeadObjective, states_of: Callable[[Batch], TargetStates]) -> dict[str, float]:
        """Return what training promises; the objective is left in the mode it was in.

        Args:
            objective: the head under training, not wrapped.
            states_of: reads the target's states over a batch.

        Returns:
            `conditional_k` and `joint_k` for each draft k of a round, over all places: whether the likeliest tokens agree at
            depth k where they did at all before (left out where they never did), and at all up to k. `predicted_tau`, where
            decoding is greedy.
        """
        was_training = objective.training
        objective.eval()
        try:
            tokens, rounds, *by_depth = self._counts(objective, states_of).tolist()
        finally:
            objective.train(was_training)
        num_depths = len(by_depth) // 3
        columns = zip(*(by_depth[start : start + num_depths] for start in range(0, len(by_depth), num_depths)), strict=True)
        metrics = {} if self.decode.temperature else {"predicted_tau": tokens / max(rounds, 1)}
        for number, (agreed, reached, origins) in enumerate(list(columns)[: self.decode.num_speculative_tokens], start=1):
            if reached:
                metrics[f"conditional_{number}"] = agreed / reached
            metrics[f"joint_{number}"] = agreed / max(origins, 1)
        return metrics

    def _counts(self, objective: HeadObjective, states_of: Callable[[Batch], TargetStates]) -> Tensor:
        """Return tokens and rounds of the walks, then by depth where all agreed, where all before did, and all places."""
        own = self.examples[self.accelerator.process_index :: self.accelerator.num_processes]
        counts = torch.stack(
            [
                self._batch_counts(objective, states_of, examples)
                for examples in _batches(own or self.examples[:1], self.decode.batch_size)
            ]
        ).sum(0)
        # A process without conversations takes part in the sum all the same.
        return self.accelerator.reduce(counts if own else torch.zeros_like(counts), "sum")

    def _batch_counts(
        self, objective: HeadObjective, states_of: Callable[[Batch], TargetStates], examples: Sequence[Example]
    ) -> Tensor:
        batch = collate(examples).to(self.accelerator.device)
        with self.accelerator.autocast():
            result: HeadLoss = objective(batch, states_of(batch), batch.loss_mask_BT[:, 1:].sum().clamp(min=1), 1)
        accepted_BT = result.accepted_P.view_as(batch.input_ids_BT).tolist()
        walks = [
            walk(accepted_T, example.answer_start, len(example.input_ids), self.decode.num_speculative_tokens)
            for accepted_T, example in zip(accepted_BT, examples, strict=True)
        ]
        by_depth = torch.cat([result.joint_agrees_K, result.reached_K, result.origins_K])
        return torch.cat([by_depth.new_tensor(walks).sum(0), by_depth])


def walk(accepted_T: Sequence[int], start: int, end: int, num_tokens: int) -> tuple[int, int]:
    """Return how many tokens greedy decoding commits in an answer after its first one, and in how many rounds.

    Args:
        accepted_T: by origin j, how many drafts in a row the target would accept where x_{j+1} is pending.
        start: position of the answer's first token, which comes from reading the prompt.
        end: the position after the answer's last token.
        num_tokens: drafts a round.
    """
    pending, rounds = start, 0
    while pending + 1 < end:
        room = end - pending - 2  # one token of each round is the target's own
        pending += 1 + min(accepted_T[pending - 1], num_tokens, room)
        rounds += 1
    return end - 1 - start, rounds


def _batches(examples: Sequence[Example], size: int) -> list[Sequence[Example]]:
    return [examples[start : start + size] for start in range(0, len(examples), size)]
