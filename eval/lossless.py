"""Did speculation change the output? The verdict, and what it rests on.

Greedy decoding must give the same tokens. Where it does not, the target's logits say why: a forward over several rows
rounds differently from one over a single row, so two tokens that are nearly equally good may swap (a numerical tie); any
larger gap is a bug. How near is near is measured, not guessed: by the rounding error of the target's logits at that very
place, against a copy of it in a wider dtype. Ties are rare enough in float32 that a few prompts decoded there, with the same
draft, show the difference between rounding and a mistake. Sampling has no such identity, so the rule in use is proved by
exact enumeration on a toy, and greedy decoding with the same draft and shape checks the machinery around it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from configs.schema import DecodeConfig, LosslessConfig
from distill.target import Target, move
from eval.decode import Request, decode
from eval.enumeration import enumerate_rule, random_toy
from eval.judging import RULES
from eval.records import Divergence, Generation
from heads.artifact import Draft
from heads.fast_forward import is_registered
from heads.lean_forward import make_lean
from heads.lm_head import backbone, head_logits

LOSSLESS, UP_TO_TIES, NOT_LOSSLESS = "lossless", "lossless_up_to_ties", "not_lossless"
ENUMERATION_TOLERANCE = 1e-12
COMPARED_TOKENS = 32  # the likeliest tokens, whose logits' rounding error is looked at
NO_TIE = float(torch.finfo(torch.float32).max)  # the gap reported where no two tokens can be compared; JSON has no infinity


def judge_lossless(
    target: Target,
    plain: Sequence[Generation],
    speculative: Sequence[Generation],
    decode_config: DecodeConfig,
    config: LosslessConfig,
    draft_for: Callable[[Target], Draft],
) -> dict[str, Any]:
    """Return the report's `lossless` section.

    Args:
        target: the target the generations came from.
        plain, speculative: the same requests, decoded both ways under `decode_config`.
        decode_config: how they were decoded.
        config: what counts as a tie, and how many prompts are checked once more in float32.
        draft_for: loads the draft for a copy of the target in another dtype.
    """
    checks: dict[str, Any] = {}
    if decode_config.temperature == 0:
        divergences = find_divergences(target, plain, speculative, config.tie_noise)
        checked = len(speculative)
    else:
        checks["enumeration"] = check_rule(decode_config.verification)
        divergences, checked = [], 0
    requests = [
        Request(prompt_id=generation.prompt_id, category=generation.category, tokens=generation.prompt_tokens)
        for generation in speculative[: config.check_float32_prompts]
    ]
    if requests:
        in_float32 = _check_in_float32(target, requests, decode_config, config, draft_for)
        checks["float32_greedy"] = {
            "checked_prompts": len(requests),
            "divergences": [asdict(divergence) for divergence in in_float32],
        }
        checked = max(checked, len(requests))
        divergences = divergences + [divergence for divergence in in_float32 if not is_tie(divergence)]
    return {
        "verdict": _verdict(divergences, checks),
        "checked_prompts": checked,
        "divergences": divergences,
        "tie_noise": config.tie_noise,
        "checks": checks,
    }


def find_divergences(
    target: Target, plain: Sequence[Generation], speculative: Sequence[Generation], tie_noise: float
) -> list[Divergence]:
    """Return the first difference of each prompt whose two greedy outputs are not the same.

    Args:
        target: the target both came from; where anything differs, a copy in a wider dtype is made for the while.
        plain, speculative: the same requests, decoded both ways.
        tie_noise: see `configs.schema.LosslessConfig`.
    """
    other = {generation.prompt_id: generation for generation in speculative}
    pairs = [(generation, other[generation.prompt_id]) for generation in plain]
    differing = [(one, another) for one, another in pairs if one.tokens != another.tokens]
    exact = widened(target) if differing else target
    return [_first_difference(target, exact, one, another, tie_noise) for one, another in differing]


def is_tie(divergence: Divergence) -> bool:
    """Say whether the two tokens were equally good to the target, as far as its dtype can tell."""
    return divergence.logit_gap <= divergence.tie_tolerance


def check_rule(name: str) -> dict[str, Any]:
    """Hold a sampling rule against exact enumeration on random toys; `match` draws the target's own tokens and needs none."""
    if name not in RULES:
        return {"rule": name, "toys": 0, "max_total_variation": 0.0}
    distances = [enumerate_rule(RULES[name], random_toy(seed)).total_variation for seed in range(3)]
    return {"rule": name, "toys": len(distances), "max_total_variation": max(distances)}


def _verdict(divergences: Sequence[Divergence], checks: dict[str, Any]) -> str:
    enumeration = checks.get("enumeration")
    if enumeration is not None and enumeration["max_total_variation"] > ENUMERATION_TOLERANCE:
        return NOT_LOSSLESS
    if not divergences:
        return LOSSLESS
    return UP_TO_TIES if all(map(is_tie, divergences)) else NOT_LOSSLESS


def _first_difference(
    target: Target, exact: Target, plain: Generation, speculative: Generation, tie_noise: float
) -> Divergence:
    pairs = zip(plain.tokens, speculative.tokens, strict=False)
    position = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
    if position is None:
        # One is the beginning of the other: a stop was missed or invented, which no rounding does.
        position = min(len(plain.tokens), len(speculative.tokens))
        longer = max(plain.tokens, speculative.tokens, key=len)
        return Divergence(
            prompt_id=plain.prompt_id,
            position=position,
            plain_token=longer[position],
            speculative_token=longer[position],
            logit_gap=NO_TIE,
            tie_tolerance=0.0,
        )
    one, other = plain.tokens[position], speculative.tokens[position]
    gap, error = _gap_and_error(target, exact, (*plain.prompt_tokens, *plain.tokens[:position]), one, other)
    return Divergence(
        prompt_id=plain.prompt_id,
        position=position,
        plain_token=one,
        speculative_token=other,
        logit_gap=gap,
        tie_tolerance=tie_noise * error,
    )


def widened(target: Target) -> Target:
    """Return the target in the next wider dtype, the measure of its rounding: float32 for half precision, else float64."""
    dtype = target.model.dtype
    wider = torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64
    return target if dtype == wider else _copied(target, wider)


def _copied(target: Target, dtype: torch.dtype) -> Target:
    return replace(target, model=move(copy.deepcopy(target.model), target.device, dtype))


def _gap_and_error(target: Target, exact: Target, prefix: Sequence[int], one: int, other: int) -> tuple[float, float]:
    """Return how far the worse of two tokens is from the exact best one, and the rounding error of the target's logits there.

    The error is the largest among the likeliest tokens, and at least the dtype's relative precision of the best logit.
    Both come from one plain forward over the prefix, not from the decoder under judgement.
    """
    exact_V = _last_logits(exact, prefix).double()
    best_V = exact_V.topk(min(COMPARED_TOKENS, len(exact_V))).indices
    error = float((_last_logits(target, prefix).double() - exact_V)[best_V].abs().max())
    least = torch.finfo(target.model.dtype).eps * abs(float(exact_V.max()))
    return float(exact_V.max() - torch.minimum(exact_V[one], exact_V[other])), max(error, least)


@torch.inference_mode()
def _last_logits(target: Target, prefix: Sequence[int]) -> torch.Tensor:
    ids_1T = torch.tensor([prefix], device=target.device)
    hidden_1TD = backbone(target.model)(input_ids=ids_1T, use_cache=False).last_hidden_state
    return head_logits(target.model, hidden_1TD[:, -1]).squeeze(0)


def _check_in_float32(
    target: Target,
    requests: Sequence[Request],
    decode_config: DecodeConfig,
    config: LosslessConfig,
    draft_for: Callable[[Target], Draft],
) -> list[Divergence]:
    """Decode requests greedily both ways in float32 and return the differences."""
    in_float32 = _copied(target, torch.float32)
    if is_registered(target.model):
        make_lean(in_float32.model)
    proposer = draft_for(in_float32).proposer
    greedy = decode_config.model_copy(update={"temperature": 0.0})
    plain, speculative = [], []
    for start in range(0, len(requests), decode_config.batch_size):
        batch = requests[start : start + decode_config.batch_size]
        plain += decode(in_float32, batch, greedy, None)[0]
        speculative += decode(in_float32, batch, greedy, proposer)[0]
    return find_divergences(in_float32, plain, speculative, config.tie_noise)
