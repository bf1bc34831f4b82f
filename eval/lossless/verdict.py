"""The losslessness verdict: whether speculation changed the output, and the check that this rests on.

Of greedy answers every token must be the target's choice up to rounding (`eval.lossless.teacher_forcing`), and every end the
right one. They may still differ from plain decoding's: a forward over several rows rounds differently from one over a single
row, so that a near tie falls the other way, and the text goes on from there.

Of samples the first tokens of many continuations of one text are held against their exact probabilities
(`eval.lossless.first_tokens`). That each rule keeps the target's distribution is proved by exact enumeration in the test suite.
A lossy mode is `lossy_by_design`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import LosslessConfig
from eval.decoder.records import FAILED, UNDECODED, Generation
from eval.decoder.request import BatchRow, Request
from eval.lossless.first_tokens import check_first_tokens
from eval.lossless.teacher_forcing import TokenCheck, check_tokens
from eval.metrics.answers import pair_answers
from heads.frozen.loading import Target
from heads.proposers.protocol import Proposer

LOSSLESS, UP_TO_TIES, NOT_LOSSLESS, LOSSY = "lossless", "lossless_up_to_ties", "not_lossless", "lossy_by_design"
PASS, FAIL, INCONCLUSIVE = "pass", "fail", "inconclusive"
SHOWN = 10  # wrong tokens that the report names

Check = dict[str, Any]


def judge_lossless(
    target: Target,
    plain: Sequence[Generation],
    speculative: Sequence[Generation],
    decode_config: DecodeConfig,
    config: LosslessConfig,
    proposer: Proposer | None,
) -> dict[str, Any]:
    """Return the report's `lossless` section; without a proposer samples are not tested.

    A check that fails makes the verdict `not_lossless`; else one that is inconclusive, or the lack of any, makes it so.
    """
    pairs = [
        pair
        for pair in pair_answers(plain, speculative)
        if not UNDECODED.intersection(answer.stop_reason for answer in pair)  # the report lists these as failed
    ]
    lossy, greedy = decode_config.lossy is not None, None
    checks: dict[str, Check] = {}
    if decode_config.temperature == 0:
        start = time.perf_counter()
        sides = [one for one, _ in pairs], [other for _, other in pairs]
        greedy = check_tokens(target, *sides, config.tie_noise, decode_config.kv_cache)
        wrong_ends = sum(not _ends_rightly(target, answer, decode_config) for _, answer in pairs)
        checks["greedy"] = _describe(greedy, wrong_ends) | {"seconds": time.perf_counter() - start}
    elif not lossy and proposer is not None and config.first_token_samples:
        checks["first_tokens"] = check_samples(target, proposer, [one for one, _ in pairs], decode_config, config)
    failed, inconclusive = ([name for name in checks if checks[name]["outcome"] == outcome] for outcome in (FAIL, INCONCLUSIVE))
    divergences = [] if greedy is None else greedy.divergences
    if failed:
        verdict = NOT_LOSSLESS
    elif lossy:
        verdict = LOSSY
    elif inconclusive or not checks:
        verdict = INCONCLUSIVE
    else:
        verdict = UP_TO_TIES if divergences else LOSSLESS
    return {
        "verdict": verdict,
        "checked_prompts": sum(check["checked_prompts"] for check in checks.values()),
        "checked_tokens": None if greedy is None else greedy.num_tokens,
        "tolerance": None if greedy is None else greedy.tolerance,
        "largest_gap": None if greedy is None else greedy.largest_gap,
        "divergences": [each._asdict() for each in divergences],
        "tie_noise": config.tie_noise,
        "failed_checks": failed,
        "inconclusive_checks": inconclusive,
        "checks": checks,
    }


def _ends_rightly(target: Target, answer: Generation, config: DecodeConfig) -> bool:
    """Return whether an answer's tokens, given to a row of the decoder one by one, end it where it ended and why."""
    if answer.stop_reason in FAILED:  # the report lists it as such
        return True
    request = Request(prompt_id=answer.prompt_id, category=answer.category, tokens=answer.prompt_tokens)
    row = BatchRow(request, target, config)
    return row.commit(answer.tokens) == answer.tokens and row.stop_reason == answer.stop_reason


def _describe(greedy: TokenCheck, wrong_ends: int) -> Check:
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


def check_samples(
    target: Target, proposer: Proposer, plain: Sequence[Generation], decode_config: DecodeConfig, config: LosslessConfig
) -> Check:
    """Return the test of the first tokens: it fails where its p-value is at most the rate of false alarms.

    Else it is inconclusive where it has no p-value, or where the least difference that it shows in four of five runs
    (`detectable_difference`) is above what it must show.
    """
    rate, must_show = config.false_alarm_rate, config.must_show_variation
    test = check_first_tokens(target, proposer, plain, decode_config, config.first_token_samples, 1 - rate)
    test |= {"false_alarm_rate": rate, "must_show": must_show, "checked_prompts": int(test["num_samples"] > 0)}
    if test["p_value"] is None:
        return test | {"outcome": INCONCLUSIVE}
    if test["p_value"] <= rate:
        return test | {"outcome": FAIL}
    if test["detectable_difference"] is None or test["detectable_difference"] > must_show:
        return test | {"outcome": INCONCLUSIVE, "reason": "would_miss_what_it_must_show"}
    return test | {"outcome": PASS}
