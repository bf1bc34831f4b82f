"""Did speculation change the output? The verdict, and what it rests on.

Greedy decoding must give the same tokens. Where it does not, the target's logits say why: a forward over several rows
rounds differently from one over a single row, so two tokens whose logits are a few units in the last place apart may swap
(a numerical tie); any larger gap is a bug. Ties are rare enough in float32 that a few prompts decoded there, with the same
draft, show the difference between rounding and a mistake. Sampling has no such identity, so the rule in use is proved by
exact enumeration on a toy, and greedy decoding with the same draft and shape checks the machinery around it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from configs.schema import DecodeConfig, LosslessConfig
from distill.target import Target
from eval.decode import RULES, Request, decode
from eval.enumeration import enumerate_rule, random_toy
from eval.records import Divergence, Generation
from heads.artifact import Draft
from heads.lm_head import backbone, head_logits

LOSSLESS, UP_TO_TIES, NOT_LOSSLESS = "lossless", "lossless_up_to_ties", "not_lossless"
ENUMERATION_TOLERANCE = 1e-12
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
        divergences = find_divergences(target, plain, speculative, config.tie_ulps)
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
        "tie_ulps": config.tie_ulps,
        "checks": checks,
    }


def find_divergences(
    target: Target, plain: Sequence[Generation], speculative: Sequence[Generation], tie_ulps: float
) -> list[Divergence]:
    """Return the first difference of each prompt whose two greedy outputs are not the same."""
    other = {generation.prompt_id: generation for generation in speculative}
    found = [_first_difference(target, generation, other[generation.prompt_id], tie_ulps) for generation in plain]
    return [divergence for divergence in found if divergence is not None]


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


def _first_difference(target: Target, plain: Generation, speculative: Generation, tie_ulps: float) -> Divergence | None:
    if plain.tokens == speculative.tokens:
        return None
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
    gap, tolerance = _logit_gap(target, (*plain.prompt_tokens, *plain.tokens[:position]), one, other, tie_ulps)
    return Divergence(
        prompt_id=plain.prompt_id,
        position=position,
        plain_token=one,
        speculative_token=other,
        logit_gap=gap,
        tie_tolerance=tolerance,
    )


@torch.inference_mode()
def _logit_gap(target: Target, prefix: Sequence[int], one: int, other: int, tie_ulps: float) -> tuple[float, float]:
    """Return how far the two tokens' logits are from the largest, in one forward over the prefix, and what counts as a tie."""
    ids_1T = torch.tensor([prefix], device=target.device)
    hidden_1TD = backbone(target.model)(input_ids=ids_1T, use_cache=False).last_hidden_state
    logits_V = head_logits(target.model, hidden_1TD[0, -1]).float()
    largest = float(logits_V.max())
    gap = largest - float(torch.minimum(logits_V[one], logits_V[other]))
    ulp = torch.finfo(target.model.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(largest), 1e-30)))
    return gap, tie_ulps * ulp


def _check_in_float32(
    target: Target,
    requests: Sequence[Request],
    decode_config: DecodeConfig,
    config: LosslessConfig,
    draft_for: Callable[[Target], Draft],
) -> list[Divergence]:
    """Decode requests greedily both ways in float32 and return the differences."""
    exact = replace(target, model=copy.deepcopy(target.model).float())
    proposer = draft_for(exact).proposer
    greedy = decode_config.model_copy(update={"temperature": 0.0})
    plain, speculative = [], []
    for start in range(0, len(requests), decode_config.batch_size):
        batch = requests[start : start + decode_config.batch_size]
        plain += decode(exact, batch, greedy, None)[0]
        speculative += decode(exact, batch, greedy, proposer)[0]
    return find_divergences(exact, plain, speculative, config.tie_ulps)
