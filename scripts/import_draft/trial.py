"""The trial of an imported draft: decode a few prompts with it, and test other readings of its config (layer ids, norm).

Programs count the ids of hidden states in two ways, one apart. At every position of the target's answers the expected number of
accepted drafts is computed from the states of either reading: q_1 + q_1 q_2 + ..., where q_k is the head's probability of the
text's k-th next token. It varies less than counts of drawn drafts do.
B batch (1), T positions, K depths, N origins, A taps, C texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.runtime.errors import InputError
from configs.schema.commands.release import TAP_OF_ID, ImportConfig, LayerIds
from configs.schema.decoding import DecodeConfig
from eval.decoder.decode import Request, decode
from heads.families.registry import FAMILIES, serve
from heads.formats.importing.importer import Fitted
from heads.frozen.hidden_states import TargetStates, num_blocks, read_states
from heads.frozen.loading import Target
from heads.modules.interface import Batch
from heads.modules.output_head import HeadModule

MIN_STANDARD_ERRORS = 3.0  # standard errors by which another reading must be ahead
MIN_GAIN = 0.005  # ... and drafts a position, so that many positions do not make a trifle clear


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How many drafts the target accepts a round, and what the user is warned of."""

    accepted_per_round: float
    warnings: list[str]


def try_out(
    fitted: Fitted, target: Target, config: ImportConfig, num_speculative_tokens: int, layer_ids: LayerIds | None
) -> Trial | None:
    """Decode with a draft, and see whether its config may have meant other states; None where the config leaves the trial out.

    An InputError says that too few drafts are accepted, or that with another reading clearly more are.
    """
    if config.min_accepted_per_round == 0:
        return None
    family = FAMILIES[fitted.settings.kind]
    head = family.build(fitted.settings, target.model, fitted.vocabulary)
    for name, value in head.state_dict().items():  # one after another: only one tensor is in memory twice
        value.copy_(fitted.weights[name])
    head = serve(head, target.model)
    prompts = [target.encode_chat([{"role": "user", "content": prompt}]) for prompt in config.prompts]
    settings = DecodeConfig(num_speculative_tokens=num_speculative_tokens, max_new_tokens=config.max_new_tokens)
    requests = [Request(prompt_id=str(number), category="", tokens=tuple(tokens)) for number, tokens in enumerate(prompts)]
    generations, _ = decode(target, requests, settings, family.propose(head, target.device))
    answers = [generation.tokens for generation in generations]
    accepted = [each.num_accepted for generation in generations for each in generation.rounds]
    accepted_per_round = sum(accepted) / len(accepted) if accepted else 0.0
    better = _better_reading(cast(HeadModule, head), target, prompts, answers)
    hint = "" if better is None else _hint(better, layer_ids, fitted)
    if accepted_per_round < config.min_accepted_per_round:
        raise InputError(
            f"the target accepts {accepted_per_round:.3f} drafts a round on {len(prompts)} prompts, below "
            f"min_accepted_per_round {config.min_accepted_per_round:g}: "
            + (hint or "the draft is another target's, or does something that its config does not say")
        )
    if better is None:
        return Trial(accepted_per_round=accepted_per_round, warnings=[])
    chosen = config.layer_ids is not None if better.reading.shift else config.reads is not None
    if not chosen:
        raise InputError(f"its config seems to mean other states than it was taken to mean: {hint}")
    return Trial(accepted_per_round=accepted_per_round, warnings=[f"taken as told, but {hint}"])


def _better_reading(
    head: HeadModule, target: Target, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> TapComparison | None:
    """Return the best reading among those clearly ahead of the draft's own, if any is."""
    texts = [([*prompt, *answer], len(prompt)) for prompt, answer in zip(prompts, answers, strict=True) if len(answer) > 2]
    readings = other_readings(head.taps, target.model, getattr(head.settings, "reads", None))
    if not texts or not readings:
        return None
    compared = compare_readings(head, target.model, texts, readings)
    clear = [each for each in compared if each.gain > max(MIN_GAIN, MIN_STANDARD_ERRORS * each.gain_error)]
    return max(clear, key=lambda each: each.expected, default=None)


def _hint(better: TapComparison, layer_ids: LayerIds | None, fitted: Fitted) -> str:
    """Say which reading is accepted more, and the setting that takes it."""
    words = (
        f"with {better.reading.name} more of its drafts stay, {better.expected:.3f} a position in place of "
        f"{better.expected - better.gain:.3f} (the difference is known to {better.gain_error:.3f})"
    )
    if better.reading.other_norm:
        other = "pre_norm" if fitted.settings.reads == "post_norm" else "post_norm"
        return f"{words}; --set reads={other} takes it so, --set reads={fitted.settings.reads} as it was taken"
    by_tap = {tap: name for name, tap in TAP_OF_ID.items()}
    taken: LayerIds = layer_ids or "h"
    other_ids = by_tap.get(TAP_OF_ID[taken] + better.reading.shift)
    if other_ids is None:
        return f"{words}; correct the ids in its config.json, or --set layer_ids={taken} takes them as they stand"
    return f"{words}; --set layer_ids={other_ids} takes them so, --set layer_ids={taken} as they were taken"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A way to take a draft's config: every tap shifted, or the last state on the other side of the final norm."""

    name: str
    shift: int = 0
    other_norm: bool = False


@dataclass(frozen=True, kw_only=True)
class TapComparison:
    """How many drafts stay with another reading, how many more than with the config's own, and that gain's error."""

    reading: Reading
    expected: float
    gain: float
    gain_error: float


def other_readings(taps: Sequence[int], target: PreTrainedModel, reads: str | None) -> list[Reading]:
    """Return the readings that a draft's config may have meant instead; `reads` is an MTP head's last state."""
    if reads is not None:
        return [Reading(name="reads pre_norm" if reads == "post_norm" else "reads post_norm", other_norm=True)]
    if not taps:
        return []
    shifts = [shift for shift in (-1, 1) if min(taps) + shift >= 0 and max(taps) + shift <= num_blocks(target)]
    words = {-1: "ids one lower", 1: "ids one higher"}
    return [Reading(name=words[shift], shift=shift) for shift in shifts]


@torch.no_grad()
def compare_readings(
    head: HeadModule, target: PreTrainedModel, texts: Sequence[tuple[Sequence[int], int]], readings: Sequence[Reading]
) -> list[TapComparison]:
    """Return each other reading beside the config's own, on texts that the target wrote: ids, and where the answer begins."""
    own = [expected_lengths(head, target, text, start, Reading(name="own")) for text, start in texts]
    compared = []
    for reading in readings:
        other = [expected_lengths(head, target, text, start, reading) for text, start in texts]
        gains = [other_N - own_N for other_N, own_N in zip(other, own, strict=True)]
        compared.append(
            TapComparison(
                reading=reading,
                expected=torch.cat(other).mean().item(),
                gain=torch.cat(gains).mean().item(),
                gain_error=clustered_error(gains),
            )
        )
    return compared


def clustered_error(values: Sequence[Tensor]) -> float:
    """Return the standard error of the mean of all values `[N]`, where those of a text resemble each other.

    The mean is a ratio of sums over texts; its variance is that to first order (Cochran, Sampling Techniques, 1977, section
    6.4). Infinite with fewer than two texts that have values.
    """
    sums_C = torch.stack([values_N.sum() for values_N in values if len(values_N)])
    counts_C = torch.tensor([len(values_N) for values_N in values if len(values_N)], dtype=sums_C.dtype)
    C, total = len(sums_C), counts_C.sum()
    if C < 2:
        return math.inf
    residuals_C = sums_C - counts_C * (sums_C.sum() / total)
    return ((residuals_C.square().sum() * C / (C - 1)).sqrt() / total).item()


def expected_lengths(
    head: HeadModule, target: PreTrainedModel, text: Sequence[int], answer_start: int, reading: Reading
) -> Tensor:
    """Return how many drafts are expected to stay at each origin whose first draft lies in the answer, float64 `[N]`."""
    ids_BT = torch.tensor([list(text)], device=target.device)
    T = ids_BT.shape[1]
    places_BT = torch.arange(T, device=target.device).unsqueeze(0)
    batch = Batch(
        input_ids_BT=ids_BT,
        loss_mask_BT=places_BT >= answer_start,
        position_ids_BT=places_BT,
        document_ids_BT=torch.zeros_like(ids_BT),
        conversations_BC=ids_BT.new_zeros(1, 1),
    )
    depths = head(batch, _states(head, target, ids_BT, reading))
    stays_KT = torch.zeros(len(depths), T, dtype=torch.float64, device=target.device)
    for depth, said in enumerate(depths):
        probs_NW = said.logits_of(said.hidden_ND).double().softmax(-1)
        stays_KT[depth, said.origins_N] = _probability(probs_NW, ids_BT[0, said.target_places_N + 1], head.token_ids_W)
    return stays_KT.cumprod(0).sum(0)[depths[0].origins_N].cpu()


def _probability(probs_NW: Tensor, tokens_N: Tensor, token_ids_W: Tensor | None) -> Tensor:
    """Return the probability `[N]` of the target's tokens, 0 of those that the head cannot say."""
    if token_ids_W is None:
        return probs_NW.gather(-1, tokens_N.unsqueeze(-1)).squeeze(-1)
    places_N = torch.searchsorted(token_ids_W, tokens_N).clamp(max=len(token_ids_W) - 1)
    return probs_NW.gather(-1, places_N.unsqueeze(-1)).squeeze(-1) * (token_ids_W[places_N] == tokens_N)


def _states(head: HeadModule, target: PreTrainedModel, ids_BT: Tensor, reading: Reading) -> TargetStates:
    if not reading.other_norm:
        return read_states(target, ids_BT, [tap + reading.shift for tap in head.taps])
    states = read_states(target, ids_BT, [num_blocks(target)])
    return TargetStates(final_BTE=states.taps_ABTE[0], taps_ABTE=(states.final_BTE,))
