"""Our side of the serving check: plain answers, and what the drafts of an artifact come to in our decoder on the same prompts.

One rule for both sides. An answer has as many tokens as plain decoding here gives it, its end-of-text or the limit included,
and nothing else ends it. Its first token comes from the prompt's forward; every later target step is a round. The round that
reaches the answer's length counts whole, with the drafts that were accepted beyond it, because engines count so. Then

    tau = 1 + accepted drafts / rounds

over all prompts. In a report tau leaves out what lies beyond an answer's end, so it is a little lower there. An engine that
drafts no further than the answer goes is compared with our decoder doing the same: then the last rounds have fewer drafts, and
those without any do not count. So is one that drafts by the target's whole output head where the draft has fewer tokens.
L tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.schema.decoding import DecodeConfig
from eval.decoder.decode import Request, decode
from eval.decoder.records import Generation
from eval.stats.bootstrap import Interval, ratio_interval
from heads.artifact import load_draft
from heads.frozen.loading import Target
from heads.modules.output_head import DraftHead
from scripts.lab.measuring import SEED, check_finite


@dataclass(frozen=True)
class Counts:
    rounds: int
    accepted: int


@dataclass(frozen=True, kw_only=True)
class PlainAnswers:
    endless: Target  # the target with no token that ends a text
    requests: Sequence[Request]
    plain: Sequence[Generation]

    @property
    def lengths(self) -> list[int]:
        return [len(answer.tokens) for answer in self.plain]


def decode_plainly(target: Target, requests: Sequence[Request], max_new_tokens: int) -> PlainAnswers:
    config = DecodeConfig(num_speculative_tokens=0, max_new_tokens=max_new_tokens)
    plain = [decode(target, [request], config)[0][0] for request in requests]
    check_finite(plain, "plain decoding")
    return PlainAnswers(endless=replace(target, eos_token_ids=()), requests=requests, plain=plain)


def count_ours(
    reference: PlainAnswers, artifact: Path, num_speculative_tokens: int, *, cut: bool, whole_head: bool = False
) -> list[Counts]:
    """Decode every prompt with an artifact's drafts; return its counts."""
    target = reference.endless
    proposer: Any = load_draft(artifact, target.identity, target.model).proposer
    if whole_head:
        proposer.module.lm_head = DraftHead(target.model, None, trainable=False)
    counts = []
    for request, length in zip(reference.requests, reference.lengths, strict=True):
        # With room beyond the answer's end no round is cut short for want of it.
        room = 0 if cut else num_speculative_tokens
        config = DecodeConfig(num_speculative_tokens=num_speculative_tokens, max_new_tokens=length + room)
        (answer,), _ = decode(target, [request], config, proposer)
        if cut:
            accepted = [each.num_accepted for each in answer.rounds if each.drafted]
            counts.append(Counts(len(accepted), sum(accepted)))
        else:
            counts.append(count_rounds([each.num_accepted for each in answer.rounds], length))
    return counts


def count_rounds(accepted: Iterable[int], length: int) -> Counts:
    """Count the rounds that an answer of `length` takes, the last one whole, by the drafts accepted in each in order."""
    tokens, rounds, total = 1, 0, 0
    for number in accepted:
        if tokens >= length:
            break
        tokens, rounds, total = tokens + number + 1, rounds + 1, total + number
    if tokens < length:
        raise ValueError(f"the rounds bring {tokens} tokens, and the answer has {length}")
    return Counts(rounds, total)


def tau(counts: Sequence[Counts], *, samples: int) -> Interval:
    """Return tokens per target step over prompts, with its interval, clustered by prompt."""
    steps = [each.rounds for each in counts]
    return ratio_interval([each.rounds + each.accepted for each in counts], steps, samples=samples, seed=SEED)
