"""The losslessness verdict: whether speculation changed the output, and the checks that this rests on.

Of greedy answers every token must be the target's choice up to rounding (`eval.lossless.teacher_forcing`), and every end the
right one. They may still differ from plain decoding's: a forward over several rows rounds differently from one over a single
row, so that a near tie falls the other way, and the text goes on from there.

Samples are tested twice. The first tokens of many samples of one text are held against their exact probabilities
(`eval.lossless.first_tokens`): sharp, but in one place. Answers to all prompts are compared with plain decoding's by the
target's log-likelihood: all of them, but only their mean. That each rule keeps the target's distribution is proved by exact
enumeration in the test suite. A lossy mode is `lossy_by_design`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import LosslessConfig
from eval.decoder.records import FAILED, UNDECODED, Generation
from eval.decoder.request import BatchRow, Request
from eval.lossless.first_tokens import check_first_tokens
from eval.lossless.teacher_forcing import Readings, TokenCheck, check_tokens
from eval.metrics.likelihood import mean_log_likelihood, pair_answers
from eval.stats.bootstrap import LEVEL
from eval.stats.significance import detectable_mean, holm, sign_flip_test
from heads.frozen.loading import Target
from heads.proposers.protocol import Proposer

LOSSLESS, UP_TO_TIES, NOT_LOSSLESS, LOSSY = "lossless", "lossless_up_to_ties", "not_lossless", "lossy_by_design"
PASS, FAIL, INCONCLUSIVE = "pass", "fail", "inconclusive"
SHOWN = 10  # wrong tokens that the report names
MIN_PROMPTS = 16  # below, the mean of the differences shows only gross mistakes

Check = dict[str, Any]


def judge_lossless(
    target: Target,
    plain: Sequence[Generation],
    speculative: Sequence[Generation],
    decode_config: DecodeConfig,
    config: LosslessConfig,
    proposer: Proposer | None,
    readings: Readings | None = None,
) -> dict[str, Any]:
    """Return the report's `lossless` section; without a proposer the first tokens of samples are not tested.

    `readings` are those of `check_tokens`, where several decoders' answers are judged.

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
        greedy = check_tokens(target, *sides, config.tie_noise, decode_config.kv_cache, readings)
        wrong_ends = sum(not _ends_rightly(target, answer, decode_config) for _, answer in pairs)
        checks["greedy"] = _describe(greedy, wrong_ends) | {"seconds": time.perf_counter() - start}
    elif not lossy and config.false_alarm_rate is not None:
        checks = check_samples(target, proposer, pairs, decode_config, config, config.false_alarm_rate)
    failed, inconclusive = ([name for name in checks if checks[name]["outcome"] == outcome] for outcome in (FAIL, INCONCLUSIVE))
    checked = [int(each.get("checked_prompts") or each.get("num_prompts", 0)) for each in checks.values()]
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
        "checked_prompts": max(checked, default=0),
        "checked_tokens": None if greedy is None else greedy.num_tokens,
        "differing_answers": None if greedy is None else len(divergences),
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


# --- samples ------------------------------------------------------------------------------------------------------


def check_samples(
    target: Target,
    proposer: Proposer | None,
    pairs: Sequence[tuple[Generation, Generation]],
    decode_config: DecodeConfig,
    config: LosslessConfig,
    rate: float,
) -> dict[str, Check]:
    """Return the tests by name.

    One fails where its p-value, adjusted for their number (Holm), is at most `rate`; a lossless decoder therefore fails any at
    most that often. Else it is inconclusive where it has no p-value, or where the least difference that it shows in four of
    five runs (`detectable_difference`) is above what it must show.
    """
    level = 1 - rate / 2  # half the false alarms are each test's
    tests = {"likelihood": check_likelihood(target, pairs, decode_config, level)}
    if proposer is not None and config.first_token_samples:
        plain = [answer for answer, _ in pairs]
        tests["first_tokens"] = check_first_tokens(target, proposer, plain, decode_config, config.first_token_samples, level)
    adjusted = holm({name: test["p_value"] for name, test in tests.items() if test["p_value"] is not None})
    must_show = {"likelihood": config.must_show_nats, "first_tokens": config.must_show_variation}
    for name, test in tests.items():
        p_value, detectable = adjusted.get(name), test["detectable_difference"]
        test |= {"adjusted_p_value": p_value, "false_alarm_rate": rate, "must_show": must_show[name]}
        if p_value is None:
            test["outcome"] = INCONCLUSIVE
        elif p_value <= rate:
            test["outcome"] = FAIL
        elif detectable is None or detectable > must_show[name]:
            test |= {"outcome": INCONCLUSIVE, "reason": "would_miss_what_it_must_show"}
        else:
            test["outcome"] = PASS
    return tests


def check_likelihood(
    target: Target, pairs: Sequence[tuple[Generation, Generation]], config: DecodeConfig, level: float = LEVEL
) -> Check:
    """Compare the target's mean log-probability a token, in nats, of both answers to each prompt.

    Any number computed from an answer has the same mean on both sides if both follow one distribution. This one moves when a
    decoder prefers likely or unlikely tokens. It is computed at the temperature in use but without top-k and top-p, under
    which a token at their edge, kept or not by rounding, would be impossible. A prompt counts once, by the mean of its turns.
    """
    complete = [pair for pair in pairs if not FAILED.intersection(answer.stop_reason for answer in pair)]
    by_prompt: dict[str, list[float]] = {}
    for pair in complete:
        plain, other = (0.0, 0.0)
        if pair[0].tokens != pair[1].tokens:
            plain, other = (mean_log_likelihood(target, answer, config.temperature) for answer in pair)
        by_prompt.setdefault(pair[0].prompt_id, []).append(other - plain)
    differences = np.array([np.mean(gains) for gains in by_prompt.values()])
    enough = len(differences) >= MIN_PROMPTS
    return {
        "p_value": sign_flip_test(differences, seed=config.seed) if enough else None,
        "reason": None if enough else "too_few_prompts",
        "mean_difference": float(differences.mean()) if by_prompt else None,
        "detectable_difference": detectable_mean(differences, level=level),
        "num_prompts": len(differences),
        "num_answers": len(complete),
        "num_identical": sum(plain.tokens == other.tokens for plain, other in complete),
        "num_failed": len(pairs) - len(complete),
    }
