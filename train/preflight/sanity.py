"""Checks before a long run of a head: in seconds, for what would make hours of training worthless.

1. Dry run: the untrained head is written as an artifact, loaded, and must draft the same tokens as the head in memory.
2. Overfitting one conversation: a copy of the head is trained on it until the decoder accepts a whole block of drafts, which it
   does only where the states, positions and labels of training are those that drafting starts from.
3. Parity: the copy must draft from the logits that training gives it (`train.preflight.parity`).
4. The copy is written and read back as well: weights that start at 0 can only be missed once they are trained.

That the target's states lead to its logits has been checked when target and task were made. Copies are thrown away and random
states restored: a run is the same to the bit with these checks and without.
"""

from __future__ import annotations

import logging
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from configs.runtime.errors import ConfigError, InputError
from configs.schema.decoding import DecodeConfig
from distill.dataset.batches import ConversationDataset, Example, collate
from distill.loss.head_objective import HeadLoss, HeadObjective
from eval.decoder.decode import Request, decode
from eval.decoder.records import Round
from heads.artifact import load_draft
from heads.device import restored_random_state
from heads.proposers.protocol import Proposer
from train.loop.checkpoints import Progress
from train.preflight.parity import Gap, largest_gap
from train.tasks.head import HeadTask

log = logging.getLogger("draftsmith")

LONGEST_ANSWER = 8  # tokens to overfit, or twice the drafts of a round if that is more
LEAST_ANSWER = 2  # tokens: the first is the target's own, the second can be drafted
NUM_TRIES = 16  # prompts that the target answers at most
DECODE_EVERY = 10  # steps


@dataclass(frozen=True, kw_only=True)
class OverfitResult:
    """How well a head has fitted one conversation, and how close drafting then is to training.

    num_accepted: the most drafts accepted in a round.
    num_predicted: drafts in a row, after the answer's first token, that are right by the training forward.
    agreement: share of positions where the likeliest tokens agree in training, by depth.
    """

    steps: int
    num_drafts: int  # of a whole block
    num_accepted: int
    num_predicted: int
    agreement: tuple[float, ...]
    gap: Gap

    @property
    def is_complete(self) -> bool:
        return self.num_accepted == self.num_drafts

    def __str__(self) -> str:
        agreement = ", ".join(f"{share:.2f}" for share in self.agreement)
        return (
            f"{self.num_accepted} of {self.num_drafts} drafts accepted in a round, agreement in training by depth {agreement}, "
            f"logits drafted from within {self.gap.size:.2g} of those of training"
        )


def check_before_training(task: HeadTask, dataset: ConversationDataset, accelerator: Accelerator) -> None:
    """Run the checks on a head that is about to be trained, which is left unchanged.

    Raises:
        ConfigError: the target answers nothing that could be fitted.
        InputError: the output cannot be written; or the head does not overfit a conversation, or the decoder does not accept
            the drafts of one that does.
        RuntimeError: the head drafts from other logits than in training, or other tokens once it was written and loaded.
    """
    started = time.perf_counter()
    with restored_random_state(accelerator.device):
        text = choose_text(task, dataset)
        check_reload(task, task.module, text, "untrained")
        head = task.copy_of(task.module).to(accelerator.device, torch.float32)
        objective = HeadObjective(head, task.target, task.config.loss)
        result = overfit(task, objective, text, accelerator)
        _check_result(result, text)
        check_reload(task, objective, text, "trained")
    seconds = time.perf_counter() - started
    log.info("sanity: passed in %.0f s; the artifact reads back; %s", seconds, _describe(result, text))


def choose_text(task: HeadTask, dataset: ConversationDataset) -> Example:
    """Return one of the shortest prompts with the start of the target's own greedy answer.

    The data's answer may have been sampled or written by another model, and then the decoder never reaches that text. The
    answer ends before a token outside the draft's vocabulary, and before one that repeats its predecessor, which a draft one
    position off would get right as well. The first prompt whose answer is long enough for two blocks of drafts is taken, else
    the one with the longest answer; where the target only repeats itself, its repetitions.

    Raises:
        ConfigError: no answer holds a token that could be drafted.
    """
    num_drafts = task.config.num_speculative_tokens
    tried: list[tuple[Example, Sequence[int]]] = []
    for example in (dataset[index] for index in dataset.answer_starts.argsort(kind="stable")[:NUM_TRIES]):
        tried.append((example, _own_answer(task, example)))
        if len(_changing(tried[-1][1])) >= 2 * num_drafts:
            break
    example, answer = max(tried, key=lambda each: (len(_changing(each[1])), len(each[1])))
    if len(_changing(answer)) >= LEAST_ANSWER:
        answer = _changing(answer)
    if len(answer) < LEAST_ANSWER:
        raise ConfigError(
            f"data.train: to none of the {len(tried)} shortest prompts does the target answer more than one token that the "
            "draft can say, so the sanity checks have nothing to overfit; make data with other prompts, raise "
            "head.draft_vocab_size, or set sanity.enabled to false"
        )
    start = example.answer_start
    return example._replace(input_ids=(*example.input_ids[:start], *answer))


def check_reload(task: HeadTask, module: nn.Module, text: Example, state: str) -> None:
    """Write a head, load it, and compare what both draft.

    Args:
        text: the prompt to draft on, with its answer.
        state: an adjective for the head in the complaint.

    Raises:
        InputError: the output cannot be written, or the artifact not be read.
        RuntimeError: they draft different tokens.
    """
    folder = Path(task.config.output) / f".dry-run-{uuid.uuid4().hex[:8]}"
    try:
        task.write(folder, module, Progress(), {})
        loaded = load_draft(folder, task.target.identity, task.target.model).proposer
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    num_drafts = task.config.num_speculative_tokens
    in_memory, loaded_drafts = (
        [round_.drafted for round_ in _decode(task, text, proposer, num_drafts)] for proposer in (task.proposer(module), loaded)
    )
    if in_memory != loaded_drafts:
        raise RuntimeError(
            f"sanity: the {state} {task.config.head.kind} head drafts other tokens after it was written and loaded, namely "
            f"{loaded_drafts} in place of {in_memory}: the artifact does not hold all that the head is made of"
        )


def overfit(task: HeadTask, objective: HeadObjective, text: Example, accelerator: Accelerator) -> OverfitResult:
    """Train a head on one conversation until the decoder accepts a whole block, or the steps are used up.

    Args:
        objective: the head and its loss; trained in place.

    Raises:
        InputError: the loss is not finite.
    """
    settings = task.config.sanity
    batch = collate([text]).to(accelerator.device)
    states = task.states(batch)
    objective.train()
    trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.learning_rate, weight_decay=0.0)
    num_drafts = min(task.config.num_speculative_tokens, len(text.input_ids) - text.answer_start - 1)
    for step in range(1, settings.overfit_steps + 1):
        with accelerator.autocast():
            result: HeadLoss = objective(batch, states, batch.loss_mask_BT[:, 1:].sum(), 1)
        if not result.loss.isfinite():
            raise InputError(f"sanity: the loss is {result.loss.item()} at step {step}; lower sanity.learning_rate")
        optimizer.zero_grad()
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, task.config.optimizer.max_grad_norm)
        optimizer.step()
        if step % DECODE_EVERY and step < settings.overfit_steps:
            continue
        num_drafts = min(num_drafts, len(result.labels_K))
        num_accepted = max(each.num_accepted for each in _decode(task, text, task.proposer(objective), num_drafts))
        if num_accepted == num_drafts:
            break
    return OverfitResult(
        steps=step,
        num_drafts=num_drafts,
        num_accepted=num_accepted,
        num_predicted=int(result.accepted_P[text.answer_start - 1]),
        agreement=tuple((result.agrees_K / result.labels_K.clamp(min=1)).tolist()),
        gap=largest_gap(task, objective, text, num_drafts),
    )


def _decode(task: HeadTask, text: Example, proposer: Proposer, num_drafts: int) -> Sequence[Round]:
    request = _request(text)
    # One token more than the text has, so that there is room for the target's own after a block that ends the text.
    config = DecodeConfig(num_speculative_tokens=num_drafts, max_new_tokens=len(text.input_ids) - text.answer_start + 1)
    (generation,), _ = decode(task.target, [request], config, proposer)
    return generation.rounds


def written(task: HeadTask, example: Example, config: DecodeConfig) -> Sequence[int]:
    """Return what the target answers by itself to an example's prompt."""
    (generation,), _ = decode(task.target, [_request(example)], config)
    return generation.tokens


def _request(text: Example) -> Request:
    tokens = text.input_ids[: text.answer_start]
    return Request(prompt_id="sanity", category="", tokens=tokens, media_prompt=text.media_prompt)


def _own_answer(task: HeadTask, example: Example) -> Sequence[int]:
    """Return the target's answer up to the first token that the draft cannot say; the very first is not drafted."""
    longest = max(LONGEST_ANSWER, 2 * task.config.num_speculative_tokens)
    config = DecodeConfig(num_speculative_tokens=0, max_new_tokens=longest)
    answer = written(task, example, config)
    if task.vocabulary is None:
        return answer
    known = set(task.vocabulary.token_ids_W.tolist())
    return [*answer[:1], *takewhile(known.__contains__, answer[1:])]


def _changing(answer: Sequence[int]) -> Sequence[int]:
    """Return an answer up to the first token that is the same as the one before it."""
    return [*answer[:1], *(token for _, token in takewhile(lambda pair: pair[0] != pair[1], pairwise(answer)))]


def _describe(result: OverfitResult, text: Example) -> str:
    return f"after {result.steps} steps on one conversation of {len(text.input_ids)} tokens: {result}"


def _check_result(result: OverfitResult, text: Example) -> None:
    """Refuse a head that has not fitted the conversation or drafts otherwise than it was trained, with the usual causes."""
    found, gap = f"sanity: {_describe(result, text)}", result.gap
    if not gap.is_rounding:
        raise RuntimeError(
            f"{found}, which rounding does not explain (draft {gap.draft} of round {gap.round}; {gap.tolerance} would do): the "
            "head drafts from something else than it was trained on, such as a wrong hidden state or token, a position too "
            "early or too late, another concat order; sanity.enabled=false trains all the same"
        )
    if result.is_complete:
        return
    if result.num_predicted >= result.num_drafts:
        raise InputError(
            f"{found}. By the training forward its first {result.num_predicted} drafts are right, and drafting gives the same "
            "logits, but the decoder does not accept them: the labels or the target's states used in training are of another "
            "place; sanity.enabled=false trains all the same"
        )
    raise InputError(
        f"{found}. The head does not learn a single conversation: it reads states of a wrong position, no gradient reaches it, "
        "or it needs more steps; raise sanity.overfit_steps or sanity.learning_rate if the agreement is still growing; "
        "sanity.enabled=false trains all the same"
    )
