"""Is every token of a greedy answer the target's choice? Each answer is read once more, whole, by a wider copy of the target.

After the text before it a token must have the largest logit, up to the rounding of the dtype that decoded. How much that is, is
measured at the same positions: the target reads the answer in its own dtype too, and how far a likely token's distance from the
likeliest one differs between the two readings is the rounding error. Both are plain forwards by transformers over the whole
text, not the decoder's over a few tokens, so that a mistake of its cache or of its forward cannot pass for rounding. The
decoder's kernels are other ones with errors of that size, so that a token may lie some multiple of it below the largest.
T tokens of the answer, P of them at a time, C candidates, D width, V vocabulary.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from configs.runtime.terminal import progress
from eval.decoder.records import Generation
from heads.device import CPU, free_memory, widest_float
from heads.frozen.loading import Target, load_target
from heads.frozen.media import MediaPrompt
from heads.inference.causal_lm import forward_rows, head_logits, new_cache, read_documents
from heads.inference.kv_cache import LAYERS

log = logging.getLogger("draftsmith")

KVCache = Literal["int8"] | None
COMPARED_TOKENS = 32  # the likeliest ones, whose logits' rounding error is measured
USUAL = 0.9  # the quantile of all positions' errors that any position may have: at one by itself a forward may round little
AT_ONCE = 128  # positions whose logits live at one time
MIN_TOLERANCE = 1e-30  # tolerance to divide by
FILLED = 0.9  # of the free memory, by the copy; what it computes takes some too
NO_TIE = float(torch.finfo(torch.float32).max)  # the gap reported where no two tokens can be compared; JSON has no infinity


class WrongToken(NamedTuple):
    """A token of a speculative answer that the target would not have chosen."""

    prompt_id: str
    turn: int
    position: int  # in tokens of the answer, from 0
    token: int
    logit_gap: float  # below the largest logit
    tolerance: float


class Divergence(NamedTuple):
    """Where a speculative output first differs from the plain one.

    Where one output ends and the other goes on, both tokens are the longer one's, and the gap is `NO_TIE`.
    """

    prompt_id: str
    position: int  # in tokens of the answer, from 0
    plain_token: int
    speculative_token: int
    logit_gap: float  # of the worse of the two from the target's best after the common prefix, in the wider dtype
    tie_tolerance: float  # the largest gap that counts as a numerical tie, by the rounding error measured there
    turn: int = 0

    @property
    def is_tie(self) -> bool:
        """Whether the two tokens' logits are equal up to the rounding of the target's dtype."""
        return self.logit_gap <= self.tie_tolerance


@dataclass(frozen=True, kw_only=True)
class TokenCheck:
    """What the target says of every token of some speculative answers, and where they leave the plain ones."""

    num_answers: int
    num_tokens: int
    tolerance: float  # the largest gap that rounding explains, in logits; that of the median token
    largest_gap: float  # of a token's logit from the largest logit there
    largest_gap_in_tolerances: float  # by the token's own tolerance; above 1 a token is wrong
    wrong_tokens: list[WrongToken]
    divergences: list[Divergence]

    @property
    def wrong_answers(self) -> set[tuple[str, int]]:
        """Prompt id and turn of the answers with a wrong token, or that leave the plain one where there is no tie."""
        wrong = {(each.prompt_id, each.turn) for each in self.wrong_tokens}
        return wrong | {(each.prompt_id, each.turn) for each in self.divergences if not each.is_tie}


class _Reading(NamedTuple):
    """One answer, read twice: float64 on the CPU."""

    gaps_T2: Tensor  # of the answer's own token and of the other one, below the largest logit, in the wider dtype
    errors_T: Tensor  # the rounding error in the target's dtype
    largest_T: Tensor  # the largest logit


def check_tokens(
    target: Target,
    plain: Sequence[Generation],
    speculative: Sequence[Generation],
    tie_noise: float,
    kv_cache: KVCache = None,
) -> TokenCheck:
    """Judge every token of greedy answers, and find their first differences from plain decoding's.

    The tolerance is `tie_noise` times the rounding error at a position, or the usual error where that is larger. An int8
    `kv_cache` of the decoder changes the target's distribution, so the answers are read through one as well.
    """
    pairs = pair_answers(plain, speculative)
    departures = [_first_difference(one.tokens, other.tokens) for one, other in pairs]
    exact, found = widened(target), list[_Reading]()
    with progress("checking the answers' tokens", len(pairs), "answers") as advance:
        for (one, other), place in zip(pairs, departures, strict=True):
            others = list(other.tokens)
            if place is not None and place < min(len(one.tokens), len(other.tokens)):
                others[place] = one.tokens[place]
            found.append(_read(target, exact, other, others, kv_cache))
            advance(1)
    errors_N = torch.cat([torch.zeros(0).double(), *(each.errors_T for each in found)])
    usual = float(np.quantile(errors_N.numpy(), USUAL)) if len(errors_N) else 0.0
    precision = torch.finfo(target.model.dtype).eps
    wrong, divergences, tolerances = [], [], []
    for (one, other), place, reading in zip(pairs, departures, found, strict=True):
        tolerance_T = tie_noise * torch.maximum(reading.errors_T.clamp(min=usual), precision * reading.largest_T.abs())
        gap_T = reading.gaps_T2[:, 0]
        for position in torch.nonzero(gap_T > tolerance_T).flatten().tolist():
            gap, tolerance = float(gap_T[position]), float(tolerance_T[position])
            wrong.append(WrongToken(other.prompt_id, other.turn, position, other.tokens[position], gap, tolerance))
        tolerances.append(tolerance_T)
        if place is not None:
            divergences.append(_divergence(one, other, place, reading, tolerance_T))
    none = torch.zeros(0 if len(errors_N) else 1).double()
    gap_N, tolerance_N = torch.cat([none, *(each.gaps_T2[:, 0] for each in found)]), torch.cat([none, *tolerances])
    return TokenCheck(
        num_answers=len(pairs),
        num_tokens=sum(len(other.tokens) for _, other in pairs),
        tolerance=float(tolerance_N.median()),
        largest_gap=float(gap_N.max()),
        largest_gap_in_tolerances=float((gap_N / tolerance_N.clamp(min=MIN_TOLERANCE)).max()),
        wrong_tokens=wrong,
        divergences=divergences,
    )


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position at which two answers differ, the shorter one's length where it begins the other."""
    differing = (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return next(differing, None if len(one) == len(other) else min(len(one), len(other)))


def _read(target: Target, exact: Target, answer: Generation, others: Sequence[int], kv_cache: KVCache) -> _Reading:
    """Read an answer in both dtypes; `others` are the tokens beside its own whose gaps are asked for, too."""
    if not others:
        return _Reading(torch.zeros(0, 2).double(), *torch.zeros(2, 0).double())
    text = answer.prompt_tokens, answer.tokens, answer.media_prompt, kv_cache
    exact_TD = answer_states(exact, *text)
    own_TD = exact_TD if exact is target else answer_states(target, *text)
    tokens_T2 = torch.tensor([answer.tokens, others], device=exact_TD.device).T
    split = zip(own_TD.split(AT_ONCE), exact_TD.split(AT_ONCE), tokens_T2.split(AT_ONCE), strict=True)
    pieces = [_compare(target, exact, *piece) for piece in split]
    return _Reading(*(torch.cat(column).cpu().double() for column in zip(*pieces, strict=True)))


@torch.no_grad()
def _compare(
    target: Target, exact: Target, own_PD: Tensor, exact_PD: Tensor, tokens_P2: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    exact_PV = head_logits(exact.model, exact_PD)
    best_PC, tokens_PC = exact_PV.topk(min(COMPARED_TOKENS, exact_PV.shape[1]))
    own_PC = head_logits(target.model, own_PD).gather(1, tokens_PC.to(own_PD.device)).to(best_PC.device, best_PC.dtype)
    shift_PC = own_PC - best_PC
    error_P = (shift_PC - shift_PC[:, :1]).nan_to_num(0.0, 0.0, 0.0).abs().amax(1)  # an overflow excuses nothing
    gap_P2 = (best_PC[:, :1] - exact_PV.gather(1, tokens_P2)).nan_to_num(NO_TIE, NO_TIE)
    return gap_P2, error_P, best_PC[:, 0].nan_to_num(0.0, 0.0)


def _divergence(one: Generation, other: Generation, place: int, reading: _Reading, tolerance_T: Tensor) -> Divergence:
    # One may be the beginning of the other: a stop was missed or added, which rounding does not do.
    longer = max(one.tokens, other.tokens, key=len)
    differ = place < min(len(one.tokens), len(other.tokens))
    return Divergence(
        prompt_id=one.prompt_id,
        turn=one.turn,
        position=place,
        plain_token=(one.tokens if differ else longer)[place],
        speculative_token=(other.tokens if differ else longer)[place],
        logit_gap=float(reading.gaps_T2[place].max()) if differ else NO_TIE,
        tie_tolerance=float(tolerance_T[place]) if differ else 0.0,
    )


# --- the wider copy -------------------------------------------------------------------------------------------------


def widened(target: Target) -> Target:
    """Return the target in float32 where it is in 16 bits, in float64 where it is in float32; itself in float64."""
    dtype = target.model.dtype
    wider = torch.float32 if dtype in (torch.bfloat16, torch.float16) else torch.float64
    if dtype == wider:
        return target
    if target.spread_by is not None:
        return load_target(target.spread_by.model_copy(update={"dtype": str(wider).removeprefix("torch.")}))
    home = home_of_copy(target, wider)
    # Each weight is copied straight to where it goes: a whole copy in the old dtype would take half as much again beside it.
    weights = [each for each in target.model.parameters() if each.is_floating_point()]
    copies: dict[int, Any] = {id(each): nn.Parameter(each.detach().to(home, wider, copy=True), False) for each in weights}
    copied = copy.deepcopy(target.model, copies)
    nn.Module.to(copied, device=home, dtype=wider)  # transformers wraps `to` in a way that type checkers cannot follow
    media = None if target.media is None else replace(target.media, model=copied)
    return replace(target, model=copied, media=media)


def home_of_copy(target: Target, dtype: torch.dtype) -> torch.device:
    """Return the target's device, or the CPU where that has no room for a copy in `dtype` or no such dtype."""
    needed, free = sum(each.numel() for each in target.model.parameters()) * dtype.itemsize, free_memory(target.device)
    if dtype == torch.float64 and widest_float(target.device) != dtype:
        return CPU
    if free is None or needed <= FILLED * free:
        return target.device
    log.warning(
        "losslessness is checked with a copy of the target in %s, %.1f GB, and %s has %.1f GB free: the copy runs on the CPU, "
        "which may take long",
        *(str(dtype).removeprefix("torch."), needed / 1e9, target.device, free / 1e9),
    )
    return CPU


# --- answers read whole ---------------------------------------------------------------------------------------------


def pair_answers(plain: Sequence[Generation], speculative: Sequence[Generation]) -> list[tuple[Generation, Generation]]:
    """Return each plain answer with the speculative one to the same request."""
    other = {(answer.prompt_id, answer.turn): answer for answer in speculative}
    if len(plain) != len(speculative) or any((answer.prompt_id, answer.turn) not in other for answer in plain):
        raise ValueError("plain and speculative answers must be to the same requests, one each")
    return [(answer, other[answer.prompt_id, answer.turn]) for answer in plain]


@torch.no_grad()
def answer_logits(
    target: Target, prompt: Sequence[int], answer: Sequence[int], media_prompt: MediaPrompt | None = None
) -> Tensor:
    """Return the logits `[T, V]` from which each token of an answer came; row t is after `answer[:t]`."""
    return head_logits(target.model, answer_states(target, prompt, answer, media_prompt))


@torch.no_grad()  # in inference mode a lean or compiled forward would run
def answer_states(
    target: Target,
    prompt: Sequence[int],
    answer: Sequence[int],
    media_prompt: MediaPrompt | None = None,
    kv_cache: Literal["int8"] | None = None,
) -> Tensor:
    """Return the final states `[T, D]` before each token of an answer, by one forward of transformers', or in such a cache."""
    ids_1T = torch.tensor([[*prompt, *answer[:-1]]], device=target.device)
    media = target.media_inputs([media_prompt], [prompt])
    if kv_cache is None:
        hidden_1TD = read_documents(target.model, ids_1T, None, media)
    else:
        cache = new_cache(target.model, ids_1T.shape[1], LAYERS[kv_cache])
        hidden_1TD = forward_rows(target.model, cache, ids_1T, [0], media=media)
    return hidden_1TD[0, len(prompt) - 1 :]
