"""The losslessness verdict: whether speculation changed the output, and the checks that this rests on.

Greedy decoding must give the same tokens, but for numerical ties: a forward over several rows rounds differently from one over
a single row, so two tokens whose logits differ by less than the rounding error measured there, against a copy of the target in
a wider dtype, may swap. Ties are rare in float32, so a few prompts are decoded greedily there as well. Of samples the rule is
proved (`eval.lossless.rule_proof`) and the answers are tested (`eval.lossless.sampled`); a lossy mode is `lossy_by_design`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

import torch
from torch import nn

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import LosslessConfig
from eval.decoder.decode import Request, decode
from eval.decoder.records import UNDECODED, Divergence, Generation
from eval.lossless.rule_proof import check_rule
from eval.lossless.sampled import FAIL, INCONCLUSIVE, PASS, check_samples
from eval.metrics.likelihood import answer_logits, pair_answers
from heads.device import CPU, free_memory, widest_float
from heads.inference.compiled_forward import run_alike
from heads.inference.guidance import guidance_of, guide
from heads.proposers.protocol import Proposer
from heads.target.loading import Target, load_target

log = logging.getLogger("draftsmith")

LOSSLESS, UP_TO_TIES, NOT_LOSSLESS, LOSSY = "lossless", "lossless_up_to_ties", "not_lossless", "lossy_by_design"
COMPARED_TOKENS = 32  # the likeliest tokens, whose logits' rounding error is measured
MEASURED_POSITIONS, USUAL = 32, 0.9  # the last ones of an answer, at which it is measured; the quantile of them that counts
FILLED = 0.9  # of the free memory, by a copy of the target; what it computes takes some too
NO_TIE = float(torch.finfo(torch.float32).max)  # the gap reported where no two tokens can be compared; JSON has no infinity


class HasProposer(Protocol):
    """A loaded draft: `heads.artifact.Draft`, or several as one."""

    @property
    def proposer(self) -> Proposer:
        """Its decoding side."""


def judge_lossless(
    target: Target,
    plain: Sequence[Generation],
    speculative: Sequence[Generation],
    decode_config: DecodeConfig,
    config: LosslessConfig,
    draft_for: Callable[[Target], HasProposer],
) -> dict[str, Any]:
    """Return the report's `lossless` section.

    Every entry of `checks` has an `outcome`: pass, fail or inconclusive. One that fails makes the verdict `not_lossless`; else
    one that is inconclusive makes it that, and `failed_checks` and `inconclusive_checks` name them.

    Args:
        target: the target the generations came from.
        plain, speculative: the same requests, decoded both ways under `decode_config`.
        decode_config: how they were decoded.
        config: what counts as a tie, how many prompts are checked once more in float32, and how samples are tested.
        draft_for: loads the draft for a target: this one, to sample once more, or a copy of it in another dtype.

    Raises:
        ValueError: the two sides do not answer the same requests.
    """
    compared = _decoded(plain, speculative)
    plain, speculative = [one for one, _ in compared], [another for _, another in compared]
    checks: dict[str, dict[str, Any]] = {}
    divergences: list[Divergence] = []
    if decode_config.temperature == 0:
        divergences = find_divergences(target, plain, speculative, config.tie_noise)
        checks["greedy"] = _outcome_of(divergences, len(compared))
    elif decode_config.lossy is None:
        checks["enumeration"] = check_rule(decode_config)
    if decode_config.temperature > 0 and decode_config.lossy is None and config.false_alarm_rate is not None:
        proposer = draft_for(target).proposer if config.first_token_samples else None
        tested = plain, speculative, decode_config, config.false_alarm_rate, config.first_token_samples
        checks |= check_samples(target, proposer, *tested)
    again = 0 if decode_config.rule == "smc" else config.check_float32_prompts  # greedy decoding has no particles
    if requests := [_request(generation) for generation in speculative[:again]]:
        in_float32 = _check_in_float32(target, requests, decode_config, config, draft_for)
        described = {"divergences": [asdict(divergence) for divergence in in_float32]}
        checks["float32_greedy"] = _outcome_of(in_float32, len(requests)) | described
        divergences += [divergence for divergence in in_float32 if not is_tie(divergence)]
    return _section(divergences, checks, config, lossy=decode_config.lossy is not None)


def find_divergences(
    target: Target, plain: Sequence[Generation], speculative: Sequence[Generation], tie_noise: float
) -> list[Divergence]:
    """Return the first difference of each prompt whose two greedy outputs are not the same.

    Where anything differs, a copy of the target in a wider dtype is made for the while.
    """
    differing = [(one, another) for one, another in pair_answers(plain, speculative) if one.tokens != another.tokens]
    exact = widened(target) if differing else target
    return [_first_difference(target, exact, one, another, tie_noise) for one, another in differing]


def is_tie(divergence: Divergence) -> bool:
    """Return whether the two tokens' logits are equal up to the rounding of the target's dtype."""
    return divergence.logit_gap <= divergence.tie_tolerance


def _decoded(plain: Sequence[Generation], speculative: Sequence[Generation]) -> list[tuple[Generation, Generation]]:
    """Return the pairs of answers without those of which one was not decoded, which the report lists as failed."""
    pairs = pair_answers(plain, speculative)
    return [pair for pair in pairs if not UNDECODED.intersection(answer.stop_reason for answer in pair)]


def _request(generation: Generation) -> Request:
    return Request(
        prompt_id=generation.prompt_id,
        category=generation.category,
        tokens=generation.prompt_tokens,
        turn=generation.turn,
        media_prompt=generation.media_prompt,
    )


def _outcome_of(divergences: Sequence[Divergence], num_checked: int) -> dict[str, Any]:
    """Return the outcome of a greedy check: any difference that is not a tie fails."""
    not_ties = sum(not is_tie(divergence) for divergence in divergences)
    counts = {"checked_prompts": num_checked, "num_divergences": len(divergences), "num_ties": len(divergences) - not_ties}
    return {"outcome": FAIL if not_ties else PASS, **counts}


def _section(
    divergences: Sequence[Divergence], checks: dict[str, dict[str, Any]], config: LosslessConfig, *, lossy: bool
) -> dict[str, Any]:
    failed, inconclusive = ([name for name in checks if checks[name]["outcome"] == outcome] for outcome in (FAIL, INCONCLUSIVE))
    verdict = NOT_LOSSLESS if failed else INCONCLUSIVE if inconclusive else UP_TO_TIES if divergences else LOSSLESS
    verdict = LOSSY if lossy and not failed else verdict
    return {
        "verdict": verdict,
        "checked_prompts": max((_num_checked(check) for check in checks.values()), default=0),
        "divergences": list(divergences),
        "tie_noise": config.tie_noise,
        "failed_checks": failed,
        "inconclusive_checks": inconclusive,
        "checks": checks,
    }


def _num_checked(check: dict[str, Any]) -> int:
    """Return how many prompts a check is about; the proof of a rule is about none."""
    return int(check.get("checked_prompts", check.get("num_prompts", 0)))


def _first_difference(
    target: Target, exact: Target, plain: Generation, speculative: Generation, tie_noise: float
) -> Divergence:
    pairs = zip(plain.tokens, speculative.tokens, strict=False)
    position = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
    if position is None:
        # One is the beginning of the other: a stop was missed or added, which rounding does not do.
        position = min(len(plain.tokens), len(speculative.tokens))
        one = other = max(plain.tokens, speculative.tokens, key=len)[position]
        gap, error = NO_TIE, 0.0
    else:
        one, other = plain.tokens[position], speculative.tokens[position]
        gap, error = _gap_and_error(target, exact, plain, position, one, other)
    return Divergence(
        prompt_id=plain.prompt_id,
        turn=plain.turn,
        position=position,
        plain_token=one,
        speculative_token=other,
        logit_gap=gap,
        tie_tolerance=tie_noise * error,
    )


def widened(target: Target) -> Target:
    """Return the target copied in the next wider dtype, the measure of its rounding: float32 for 16 bits, else float64."""
    dtype = target.model.dtype
    wider = torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64
    return target if dtype == wider else _copied(target, wider)


def _copied(target: Target, dtype: torch.dtype) -> Target:
    if target.spread_by is not None:  # a target that is spread over devices is loaded anew
        return load_target(target.spread_by.model_copy(update={"dtype": str(dtype).removeprefix("torch.")}))
    home = _home_for_copy(target, dtype)
    # Each weight is copied straight to where it goes: a whole copy in the old dtype would take half as much again beside it.
    weights = [each for each in target.model.parameters() if each.is_floating_point()]
    copies: dict[int, Any] = {id(each): nn.Parameter(each.detach().to(home, dtype, copy=True), False) for each in weights}
    copied = copy.deepcopy(target.model, copies)
    nn.Module.to(copied, device=home, dtype=dtype)  # wider, so nothing is rounded
    if (guidance := guidance_of(target.model)) is not None:
        guide(copied, guidance.config)
    media = None if target.media is None else replace(target.media, model=copied)
    return replace(target, model=copied, media=media)


def _home_for_copy(target: Target, dtype: torch.dtype) -> torch.device:
    """Return the target's device, or the CPU where that has no room for a copy in `dtype` or no such dtype."""
    needed, free = sum(each.numel() for each in target.model.parameters()) * dtype.itemsize, free_memory(target.device)
    if dtype == torch.float64 and widest_float(target.device) != dtype:
        return CPU
    if free is None or needed <= FILLED * free:
        return target.device
    log.warning(
        "losslessness is checked with a copy of the target in %s, %.1f GB, and %s has %.1f GB free: the copy runs on the CPU, "
        "which may take long; lossless.check_float32_prompts says how many prompts it decodes",
        *(str(dtype).removeprefix("torch."), needed / 1e9, target.device, free / 1e9),
    )
    return CPU


def _gap_and_error(
    target: Target, exact: Target, answer: Generation, position: int, one: int, other: int
) -> tuple[float, float]:
    """Return how far the worse of two tokens is from the exact best one, and the rounding error of the target's logits there.

    `position` is the place in the answer.

    The error is the largest among the likeliest tokens at that position, where a forward may happen to round little: so it is
    at least what 90 % of the last positions of the answer do not exceed, and the dtype's relative precision of the best logit.
    Both come from one plain forward over the prefix, not from the decoder, whose mistakes must not pass for rounding. Its
    forwards, over fewer rows, may run other kernels, whose errors `tie_noise` has to cover too.
    """
    first = max(position - MEASURED_POSITIONS + 1, 0)
    before, after = (*answer.prompt_tokens, *answer.tokens[:first]), (*answer.tokens[first:position], one)
    exact_TV, own_TV = (answer_logits(each, before, after, answer.media_prompt).cpu().double() for each in (exact, target))
    best_TC = exact_TV.topk(min(COMPARED_TOKENS, exact_TV.shape[1])).indices
    error_T = (own_TV - exact_TV).gather(1, best_TC).abs().amax(1)
    exact_V = exact_TV[-1]
    least = torch.finfo(target.model.dtype).eps * abs(float(exact_V.max()))
    gap = exact_V.max() - torch.minimum(exact_V[one], exact_V[other])
    return float(gap), max(float(error_T[-1]), float(error_T.quantile(USUAL)), least)


def _check_in_float32(
    target: Target,
    requests: Sequence[Request],
    decode_config: DecodeConfig,
    config: LosslessConfig,
    draft_for: Callable[[Target], HasProposer],
) -> list[Divergence]:
    """Decode requests greedily both ways in float32 and return the differences."""
    in_float32 = _copied(target, torch.float32)
    if in_float32.device == target.device:
        run_alike(in_float32.model, target.model)
    proposer = draft_for(in_float32).proposer
    greedy = decode_config.model_copy(update={"temperature": 0.0})
    plain, speculative = [], []
    for start in range(0, len(requests), decode_config.batch_size):
        batch = requests[start : start + decode_config.batch_size]
        plain += decode(in_float32, batch, greedy, None)[0]
        speculative += decode(in_float32, batch, greedy, proposer)[0]
    return find_divergences(in_float32, plain, speculative, config.tie_noise)
