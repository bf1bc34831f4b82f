"""Statistical tests that sampling with a draft still follows the target's distribution.

The first tokens of many samples of one text are tested against their exact probabilities (`eval.lossless.first_tokens`): sharp,
but in one place. Answers to all prompts are compared with plain decoding's by the target's log-likelihood: all of them, but
only their mean. Their p-values are adjusted for being two (Holm). A test that finds nothing says something only where it would
have found a difference that matters: one that would miss what the config names, in more than one of five runs, is inconclusive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import LosslessConfig
from eval.decoder.records import FAILED, Generation
from eval.lossless.first_tokens import check_first_tokens
from eval.metrics.likelihood import mean_log_likelihood, pair_answers
from eval.stats.bootstrap import LEVEL
from eval.stats.power import detectable_mean
from eval.stats.significance import holm, sign_flip_test
from heads.frozen.loading import Target
from heads.proposers.protocol import Proposer

PASS, FAIL, INCONCLUSIVE = "pass", "fail", "inconclusive"
MIN_PROMPTS = 16  # below, the mean of the differences shows only gross mistakes


def check_samples(
    target: Target,
    proposer: Proposer | None,
    plain: Sequence[Generation],
    speculative: Sequence[Generation],
    decode_config: DecodeConfig,
    config: LosslessConfig,
) -> dict[str, dict[str, Any]]:
    """Return the statistical tests by name, each with `outcome`, `p_value`, `adjusted_p_value` and the numbers it comes from.

    A test fails where its p-value, adjusted for the number of tests, is at most `config.false_alarm_rate`; a lossless decoder
    therefore fails any of them at most that often. One that does not is inconclusive where it has no p-value, or where the
    least difference that it shows in four of five runs (`detectable_difference`) is above what it must show. Without a
    proposer the first tokens are not tested.
    """
    rate = 1.0 if config.false_alarm_rate is None else config.false_alarm_rate
    level = 1 - rate / 2  # half the false alarms are each test's
    tests = {"likelihood": check_likelihood(target, plain, speculative, decode_config, level)}
    if proposer is not None and config.first_token_samples:
        tests["first_tokens"] = check_first_tokens(target, proposer, plain, decode_config, config.first_token_samples, level)
    adjusted = holm({name: test["p_value"] for name, test in tests.items() if test["p_value"] is not None})
    must_show = {"likelihood": config.must_show_nats, "first_tokens": config.must_show_variation}
    return {
        name: {"adjusted_p_value": adjusted.get(name), "false_alarm_rate": rate, "must_show": must_show[name]}
        | test
        | _outcome(test, adjusted.get(name), rate, must_show[name])
        for name, test in tests.items()
    }


def check_likelihood(
    target: Target,
    plain: Sequence[Generation],
    speculative: Sequence[Generation],
    config: DecodeConfig,
    level: float = LEVEL,
) -> dict[str, Any]:
    """Compare the target's mean log-probability a token, in nats, of both answers to each prompt.

    Any number computed from an answer has the same mean on both sides if both follow one distribution. This one moves when a
    decoder prefers likely or unlikely tokens. It is computed at the temperature in use but without top-k and top-p, under
    which a token at their edge, kept or not by rounding, would be impossible.

    Returns:
        `p_value`, two-sided, clustered by prompt (one asked several times or in several turns counts once, by its mean);
        `None` with fewer than `MIN_PROMPTS`. `mean_difference` is speculative - plain, `detectable_difference` the least
        that so many prompts would show in four of five runs of a test at `level` (`eval.stats.power`).
    """
    pairs = pair_answers(plain, speculative)
    complete = [pair for pair in pairs if not FAILED.intersection(answer.stop_reason for answer in pair)]
    by_prompt: dict[str, list[float]] = {}
    for one, another in complete:
        by_prompt.setdefault(one.prompt_id, []).append(_likelihood_gain(target, one, another, config.temperature))
    differences = np.array([np.mean(gains) for gains in by_prompt.values()])
    enough = len(differences) >= MIN_PROMPTS
    return {
        "p_value": sign_flip_test(differences, seed=config.seed) if enough else None,
        "reason": None if enough else "too_few_prompts",
        "mean_difference": float(differences.mean()) if by_prompt else None,
        "detectable_difference": detectable_mean(differences, level=level),
        "num_prompts": len(differences),
        "num_answers": len(complete),
        "num_identical": sum(one.tokens == another.tokens for one, another in complete),
        "num_failed": len(pairs) - len(complete),
    }


def _likelihood_gain(target: Target, plain: Generation, speculative: Generation, temperature: float) -> float:
    """Return the speculative answer's mean log-likelihood minus the plain one's, in nats a token."""
    if plain.tokens == speculative.tokens:
        return 0.0
    return mean_log_likelihood(target, speculative, temperature) - mean_log_likelihood(target, plain, temperature)


def _outcome(test: dict[str, Any], adjusted_p_value: float | None, false_alarm_rate: float, must_show: float) -> dict[str, Any]:
    """Return the outcome, with the reason where the test is too insensitive."""
    detectable = test["detectable_difference"]
    if adjusted_p_value is None:
        return {"outcome": INCONCLUSIVE}
    if adjusted_p_value <= false_alarm_rate:
        return {"outcome": FAIL}
    if detectable is None or detectable > must_show:
        return {"outcome": INCONCLUSIVE, "reason": "would_miss_what_it_must_show"}
    return {"outcome": PASS}
