"""The losslessness verdict: whether speculation changed the output, and the checks that this rests on.

Of greedy answers every token must be the target's choice up to rounding (`eval.lossless.teacher_forcing`), and every end the
right one. They may still differ from plain decoding's: a forward over several rows rounds differently from one over a single
row, so that a near tie falls the other way, and the text goes on from there. Samples are tested (`eval.lossless.sampled`);
that each rule keeps the target's distribution is proved by exact enumeration in the test suite. A lossy mode is
`lossy_by_design`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import LosslessConfig
from eval.decoder.records import FAILED, UNDECODED, Generation
from eval.decoder.request import BatchRow, Request
from eval.lossless.sampled import FAIL, INCONCLUSIVE, PASS, check_samples
from eval.lossless.teacher_forcing import TokenCheck, check_tokens
from eval.metrics.likelihood import pair_answers
from heads.frozen.loading import Target
from heads.proposers.protocol import Proposer

LOSSLESS, UP_TO_TIES, NOT_LOSSLESS, LOSSY = "lossless", "lossless_up_to_ties", "not_lossless", "lossy_by_design"
SHOWN = 10  # wrong tokens that the report names


def judge_lossless(
    target: Target,
    plain: Sequence[Generation],
    speculative: Sequence[Generation],
    decode_config: DecodeConfig,
    config: LosslessConfig,
    proposer: Proposer | None,
) -> dict[str, Any]:
    """Return the report's `lossless` section.

    Every entry of `checks` has an `outcome`: pass, fail or inconclusive. One that fails makes the verdict `not_lossless`; else
    one that is inconclusive makes it that, and `failed_checks` and `inconclusive_checks` name them. Without any check it is
    inconclusive, too.

    Args:
        target: the target the generations came from.
        plain, speculative: the same requests, decoded both ways under `decode_config`.
        decode_config: how they were decoded.
        config: what counts as a tie, and how samples are tested.
        proposer: the draft, to sample once more; None: the first tokens of samples are not tested.

    Raises:
        ValueError: the two sides do not answer the same requests.
    """
    compared = _decoded(plain, speculative)
    plain, speculative = [one for one, _ in compared], [another for _, another in compared]
    lossy, greedy = decode_config.lossy is not None, None
    checks: dict[str, dict[str, Any]] = {}
    if decode_config.temperature == 0:
        start = time.perf_counter()
        greedy = check_tokens(target, plain, speculative, config.tie_noise, decode_config.kv_cache)
        wrong_ends = sum(not _ends_rightly(target, answer, decode_config) for answer in speculative)
        checks["greedy"] = _describe(greedy, wrong_ends) | {"seconds": time.perf_counter() - start}
    elif not lossy and config.false_alarm_rate is not None:
        checks |= check_samples(target, proposer, plain, speculative, decode_config, config)
    return _section(checks, greedy, config, lossy=lossy)


def _decoded(plain: Sequence[Generation], speculative: Sequence[Generation]) -> list[tuple[Generation, Generation]]:
    """Return the pairs of answers without those of which one was not decoded, which the report lists as failed."""
    pairs = pair_answers(plain, speculative)
    return [pair for pair in pairs if not UNDECODED.intersection(answer.stop_reason for answer in pair)]


def _ends_rightly(target: Target, answer: Generation, config: DecodeConfig) -> bool:
    """Return whether an answer's tokens, given to a row of the decoder one by one, end it where it ended and why."""
    if answer.stop_reason in FAILED:  # the report lists it as such
        return True
    request = Request(prompt_id=answer.prompt_id, category=answer.category, tokens=answer.prompt_tokens)
    row = BatchRow(request, target, config)
    return row.commit(list(answer.tokens), finite=True) == list(answer.tokens) and row.stop_reason == answer.stop_reason


def _describe(greedy: TokenCheck, wrong_ends: int) -> dict[str, Any]:
    """Return the greedy check's entry: one wrong token, one end or one difference that is no tie fails it."""
    right = not greedy.wrong_answers and not wrong_ends
    return {
        "outcome": INCONCLUSIVE if greedy.num_answers == 0 else PASS if right else FAIL,
        "reason": "no_answers" if greedy.num_answers == 0 else None,
        "checked_prompts": greedy.num_answers,
        "wrong_answers": len(greedy.wrong_answers),
        "wrong_tokens": len(greedy.wrong_tokens),
        "first_wrong_tokens": [each._asdict() for each in greedy.wrong_tokens[:SHOWN]],
        "wrong_ends": wrong_ends,
        "largest_gap_in_tolerances": greedy.largest_gap_in_tolerances,
    }


def _section(
    checks: dict[str, dict[str, Any]], greedy: TokenCheck | None, config: LosslessConfig, *, lossy: bool
) -> dict[str, Any]:
    failed, inconclusive = ([name for name in checks if checks[name]["outcome"] == outcome] for outcome in (FAIL, INCONCLUSIVE))
    divergences = [] if greedy is None else greedy.divergences
    undecided = bool(inconclusive) or not checks
    verdict = NOT_LOSSLESS if failed else INCONCLUSIVE if undecided else UP_TO_TIES if divergences else LOSSLESS
    verdict = LOSSY if lossy and not failed else verdict
    return {
        "verdict": verdict,
        "checked_prompts": max((_num_checked(check) for check in checks.values()), default=0),
        "checked_tokens": None if greedy is None else greedy.num_tokens,
        "differing_answers": None if greedy is None else len(divergences),
        "tolerance": None if greedy is None else greedy.tolerance,
        "largest_gap": None if greedy is None else greedy.largest_gap,
        "divergences": divergences,
        "tie_noise": config.tie_noise,
        "failed_checks": failed,
        "inconclusive_checks": inconclusive,
        "checks": checks,
    }


def _num_checked(check: dict[str, Any]) -> int:
    return int(check.get("checked_prompts", check.get("num_prompts", 0)))
