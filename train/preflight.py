"""Checks before a long run of a head: in seconds, for what would make hours of training worthless.

1. Overfitting one conversation: a copy of the head is trained on it until the decoder accepts a whole block of drafts, which it
   does only where the states, positions and labels of training are those that drafting starts from.
2. Parity: the copy must draft from the logits that training gives it. A head that knows its text may draft it correctly even
   from a wrong pending token, which follows from the state before it, so every draft of a decoding is compared.
3. The artifact: the copy is written, read back, and must draft as it did in memory. Weights that start at 0 can only be
   missed once they are trained.

Copies are thrown away and random states restored: a run is the same to the bit with these checks and without.
V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import logging
import shutil
import time
import uuid
from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from configs.runtime.errors import ConfigError, InputError
from configs.schema.decoding import DecodeConfig
from distill.dataset.batches import ConversationDataset, Example, collate
from distill.loss.objectives import HeadLoss, HeadObjective
from eval.decoder.decode import Request, decode
from eval.decoder.records import Generation
from heads.artifact import load_draft
from heads.device import restored_random_state
from heads.families.registry import serve
from heads.modules.interface import Depth
from heads.modules.output_head import HeadModule
from heads.proposers.protocol import Proposal, Proposer, RoundInputs
from train.loop.checkpoints import Progress
from train.tasks.head import HeadTask

log = logging.getLogger("draftsmith")

LONGEST_ANSWER = 8  # tokens to overfit, or twice the drafts of a round if that is more
LEAST_ANSWER = 2  # tokens: the first is the target's own, the second can be drafted
NUM_TRIES = 16  # prompts that the target answers at most
DECODE_EVERY = 10  # steps
MORE_TOKENS = 16  # compared after the fitted text, so that some rounds keep a part of their drafts and some keep none
# The largest relative difference that counts as rounding. Right heads on SmolLM2-135M reached 0.06 in bfloat16; wrong tokens,
# states and orders made 0.1 to 1.8 on tiny targets, the least where a head hardly reads what is wrong.
TOLERANCES = {torch.bfloat16: 0.2, torch.float16: 0.03, torch.float32: 0.01}


class Gap(NamedTuple):
    """The largest difference of drafting and training: the norm of the logits' difference over that of the centred logits."""

    size: float
    draft: int  # which of its round, from 1
    round: int  # from 1
    tolerance: float  # up to it, the order of sums alone may be the cause


def check_before_training(task: HeadTask, dataset: ConversationDataset, accelerator: Accelerator) -> None:
    """Run the checks on a head that is about to be trained, which is left unchanged.

    A ConfigError or InputError says what a person can change, a RuntimeError that drafting or the artifact is wrong.
    """
    started = time.perf_counter()
    with restored_random_state(accelerator.device):
        text = choose_text(task, dataset)
        head = task.copy_of(task.module).to(accelerator.device, torch.float32)
        objective = HeadObjective(head, task.target, task.config.loss)
        found = overfit(task, objective, text, accelerator)
        check_reload(task, objective, text)
    seconds = time.perf_counter() - started
    log.info("sanity: passed in %.0f s; the artifact reads back; %s", seconds, found)


def choose_text(task: HeadTask, dataset: ConversationDataset) -> Example:
    """Return one of the shortest prompts with the start of the target's own greedy answer; the data's may be another's.

    It ends before a token outside the draft's vocabulary, and before a repetition, which a draft one off gets right too.
    """
    best, longest = None, (0, 0)  # by tokens up to the first repeat, then by all of them
    for example in (dataset[index] for index in dataset.answer_starts.argsort(kind="stable")[:NUM_TRIES]):
        answer = _own_answer(task, example)
        changing = until_first_repeat(answer)
        if (lengths := (len(changing), len(answer))) > longest:
            longest = lengths
            kept = changing if len(changing) >= LEAST_ANSWER else answer
            best = example._replace(input_ids=(*example.input_ids[: example.answer_start], *kept), earlier=())
        if len(changing) >= 2 * task.config.num_speculative_tokens:
            break
    if best is None or longest[1] < LEAST_ANSWER:
        raise ConfigError(
            f"data.train: to none of its {NUM_TRIES} shortest prompts does the target answer more than one token that the "
            "draft can say; take other prompts, a larger head.draft_vocab_size, or sanity.enabled=false"
        )
    return best


def check_reload(task: HeadTask, module: nn.Module, text: Example) -> None:
    """Write a head, load it, and compare what both draft."""
    folder = Path(task.config.output) / f".dry-run-{uuid.uuid4().hex[:8]}"
    try:
        task.write(folder, module, Progress(), {})
        loaded = load_draft(folder, task.target.identity, task.target.model).proposer
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    num_drafts = task.config.num_speculative_tokens
    in_memory, loaded_drafts = (
        [round_.drafted for round_ in _decoded(task, text, proposer, num_drafts).rounds]
        for proposer in (task.proposer(module), loaded)
    )
    if in_memory != loaded_drafts:
        raise RuntimeError(
            f"sanity: the {task.config.head.kind} head drafts other tokens after it was written and loaded, namely "
            f"{loaded_drafts} in place of {in_memory}: the artifact does not hold all that the head is made of"
        )


def overfit(task: HeadTask, objective: HeadObjective, text: Example, accelerator: Accelerator) -> str:
    """Train a head on one conversation, in place, until the decoder accepts a whole block, or the steps are used up.

    Return what was found; refuse a head that has not fitted the conversation or drafts otherwise than it was trained.
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
            result: HeadLoss = objective(batch, states)
        if not result.loss.isfinite():
            raise InputError(f"sanity: the loss is {result.loss.item()} at step {step}; lower sanity.learning_rate")
        optimizer.zero_grad()
        (result.loss / batch.num_labels).backward()
        torch.nn.utils.clip_grad_norm_(trained, task.config.optimizer.max_grad_norm)
        optimizer.step()
        if step % DECODE_EVERY and step < settings.overfit_steps:
            continue
        num_drafts = min(num_drafts, len(result.labels_K))
        rounds = _decoded(task, text, task.proposer(objective), num_drafts).rounds
        num_accepted = max(each.num_accepted for each in rounds)
        if num_accepted == num_drafts:
            break
    gap = largest_gap(task, objective, text, num_drafts)
    found = (
        f"after {step} steps on one conversation {num_accepted} of {num_drafts} drafts are accepted in a round, and the logits "
        f"drafted from lie within {gap.size:.2g} of those of training"
    )
    anyway = "sanity.enabled=false trains all the same"
    if not gap.size <= gap.tolerance:  # where it is NaN, too
        raise RuntimeError(
            f"sanity: {found}, which rounding does not explain (draft {gap.draft} of round {gap.round}, {gap.tolerance} would "
            f"do): the head drafts from another hidden state, token, place or order than it was trained on; {anyway}"
        )
    if num_accepted == num_drafts:
        return found
    raise InputError(
        f"sanity: {found}: the head does not learn a single conversation. Labels or states of training are of another place, "
        f"no gradient reaches it, or sanity.overfit_steps or sanity.learning_rate is too small; {anyway}"
    )


@torch.no_grad()
def largest_gap(task: HeadTask, module: nn.Module, text: Example, num_drafts: int) -> Gap:
    """Decode a text and some more with a copy of a head, and compare each draft's logits with those of the training forward."""
    head = serve(task.copy_of(module), task.target.model)
    proposer: Any = task.family.propose(head, task.target.device)
    propose, rounds = proposer.propose, []

    def recording(inputs: RoundInputs, *args: Any, keep_logits: bool) -> Proposal:
        proposal = propose(inputs, *args, keep_logits=True)
        rounds.append((list(inputs.tokens[0]), proposal))
        return proposal

    proposer.propose = recording
    _decoded(task, text, proposer, num_drafts, num_more=MORE_TOKENS)
    tolerance = TOLERANCES.get(task.target.model.dtype, TOLERANCES[torch.float32])
    gaps = [
        Gap(size=size, draft=draft, round=number, tolerance=tolerance)
        for number, (tokens, proposal) in enumerate(rounds, 1)
        for draft, size in enumerate(_round_gaps(task, head, tokens, text, proposal), 1)
    ]
    return max(gaps, key=lambda gap: gap.size)


def _round_gaps(task: HeadTask, head: nn.Module, tokens: Sequence[int], text: Example, proposal: Proposal) -> list[float]:
    ids = (*tokens, *proposal.tokens_BG[0].tolist())
    batch = collate([text._replace(input_ids=ids)]).to(task.target.device)
    depths: list[Depth] = head(batch, task.states(batch))
    origin = len(tokens) - 2  # the last position that the target had read; the pending token comes after it
    built = cast(HeadModule, head)
    gaps = []
    as_trained = depths[: built.settings.drafted_as_trained]
    for depth, drafted_V in zip(as_trained, cast(Tensor, proposal.logits_BGV)[0], strict=False):
        trained_W = depth.logits_of(depth.hidden_ND[depth.origins_N == origin])[0].float()
        drafted_W = (drafted_V if built.token_ids_W is None else drafted_V[built.token_ids_W]).float()
        gaps.append(float((drafted_W - trained_W).norm() / (trained_W - trained_W.mean()).norm()))
    return gaps


def _decoded(task: HeadTask, text: Example, proposer: Proposer, num_drafts: int, num_more: int = 1) -> Generation:
    """Decode a text's prompt to its length and some more, so that there is room for the target's own after the last block."""
    length = len(text.input_ids) - text.answer_start + num_more
    return _answer(task, text, length, num_drafts, proposer)


def written(task: HeadTask, example: Example, num_tokens: int) -> Sequence[int]:
    """Return what the target answers by itself to an example's prompt."""
    return _answer(task, example, num_tokens).tokens


def _answer(task: HeadTask, text: Example, length: int, num_drafts: int = 0, proposer: Proposer | None = None) -> Generation:
    tokens = text.input_ids[: text.answer_start]
    request = Request(prompt_id="sanity", category="", tokens=tokens, media_prompt=text.media_prompt)
    config = DecodeConfig(num_speculative_tokens=num_drafts, max_new_tokens=length)
    return decode(task.target, [request], config, proposer)[0][0]


def _own_answer(task: HeadTask, example: Example) -> Sequence[int]:
    """Return the target's answer up to the first token that the draft cannot say; the very first is not drafted."""
    answer = written(task, example, max(LONGEST_ANSWER, 2 * task.config.num_speculative_tokens))
    if task.vocabulary is None:
        return answer
    known = set(task.vocabulary.token_ids_W.tolist())
    return [*answer[:1], *takewhile(known.__contains__, answer[1:])]


def until_first_repeat(answer: Sequence[int]) -> Sequence[int]:
    """Return an answer up to the first token that is the same as the one before it."""
    return [*answer[:1], *(token for _, token in takewhile(lambda pair: pair[0] != pair[1], pairwise(answer)))]
