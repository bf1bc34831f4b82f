"""Is every token of a greedy answer the target's choice? Each answer is read once more, whole, by the target in a wider dtype.

After the text before it a token should have the largest logit; a token with a smaller one has a gap. Rounding makes gaps where
two tokens nearly tie, in plain decoding as in speculative. How large rounding is, is measured at the same positions: the target
reads the answer in its own dtype, too, and the logits of likely tokens, less that of the likeliest, differ between the two
readings. In multiples of that error no gap may be larger than rounding explains, and the gaps of a mode's answers may not sum
to more than those of plain decoding's, which are the control. Both readings are plain forwards by transformers over the whole
text, so that a mistake of the decoder's cache or of its forward cannot pass for rounding.
T tokens of an answer, P of them at a time, C candidates, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from configs.runtime.terminal import progress
from configs.schema.decoding import DecodeConfig
from eval.decoder.records import AUTOREGRESSIVE, Generation
from eval.stats import Floats, sign_flip_p_value
from heads.device import widest_float
from heads.frozen.hidden_states import blocks
from heads.frozen.loading import Target, load_target
from heads.frozen.media import MediaPrompt
from heads.inference.causal_lm import forward_rows, head_logits, new_cache, read_documents
from heads.inference.kv_cache import LAYERS
from heads.sampling.draws import TextCounts, penalised

PLAIN = DecodeConfig()
AnswerKey = tuple[str, int, tuple[int, ...], tuple[int, ...]]  # prompt id, turn, tokens of the prompt and of the answer
COMPARED_TOKENS = 32  # the likeliest ones, whose logits' rounding error is measured
AT_ONCE = 128  # positions whose logits live at one time
OVER_PLAIN = 1.25  # times plain decoding's largest gap is allowed as well
FALSE_ALARMS = 0.01  # the share of sound decoders that the comparison with plain decoding refuses
NO_TIE = float(torch.finfo(torch.float32).max)  # the gap reported where no two tokens can be compared; JSON has no infinity


class WrongToken(NamedTuple):
    """A token that the target would not have chosen."""

    prompt_id: str
    turn: int
    position: int  # in tokens of the answer, from 0
    token: int
    logit_gap: float  # below the largest logit
    tolerance: float


class Divergence(NamedTuple):
    """Where an answer first differs from the plain one.

    Where one answer ends and the other goes on, both tokens are the longer one's, and the gap is `NO_TIE`.
    """

    prompt_id: str
    position: int  # in tokens of the answer, from 0
    plain_token: int
    speculative_token: int
    logit_gap: float  # of the worse of the two tokens below the largest logit after the common text
    tie_tolerance: float  # the largest gap that counts as a numerical tie
    turn: int = 0

    @property
    def is_tie(self) -> bool:
        """Whether the two tokens' logits are equal up to rounding."""
        return self.logit_gap <= self.tie_tolerance


@dataclass(frozen=True, kw_only=True)
class TokenCheck:
    """What the target says of every token of some answers, and how that differs from what it says of plain decoding's."""

    num_answers: int
    num_tokens: int
    largest_gap: float  # of a token's logit from the largest logit there
    largest_gap_in_roundings: float  # in rounding errors of a logit there
    tolerance: float  # the most that rounding explains, in the same unit
    off_share: float  # of tokens with a gap
    p_value: float  # the chance that a sound decoder's gaps exceed plain decoding's as far as here, or farther
    wrong_tokens: list[WrongToken]
    divergences: list[Divergence]

    @property
    def wrong_answers(self) -> set[tuple[str, int]]:
        """Prompt id and turn of the answers with a wrong token, or that leave the plain one where there is no tie."""
        wrong = {(each.prompt_id, each.turn) for each in self.wrong_tokens}
        return wrong | {(each.prompt_id, each.turn) for each in self.divergences if not each.is_tie}

    @property
    def is_right(self) -> bool:
        """Whether no answer is wrong and the gaps are no more and no larger than plain decoding's."""
        return not self.wrong_answers and self.p_value > FALSE_ALARMS


def check_tokens(
    target: Target, plain: Sequence[Generation], other: Sequence[Generation], tie_noise: float, config: DecodeConfig = PLAIN
) -> TokenCheck:
    """Judge one mode's greedy answers by plain decoding's (`check_modes`)."""
    return check_modes(read_answers(target, [*plain, *other], config), plain, {"other": other}, tie_noise)["other"]


def check_modes(
    readings: Mapping[AnswerKey, Reading],
    plain: Sequence[Generation],
    by_mode: Mapping[str, Sequence[Generation]],
    tie_noise: float,
) -> dict[str, TokenCheck]:
    """Judge every token of greedy answers: plain decoding's first, by the name `AUTOREGRESSIVE`, then those of other modes.

    A gap may be `tie_noise` rounding errors, in plain decoding twice that; or `OVER_PLAIN` times plain decoding's largest,
    where that is more. The sum of a prompt's gaps is compared with that of its plain answers (`sign_flip_p_value`).
    """
    most = 2 * tie_noise
    checks = {AUTOREGRESSIVE: _check(pair_answers(plain, plain), readings, most)}
    tolerance = max(tie_noise, OVER_PLAIN * min(checks[AUTOREGRESSIVE].largest_gap_in_roundings, most))
    return checks | {mode: _check(pair_answers(plain, answers), readings, tolerance) for mode, answers in by_mode.items()}


def _check(pairs: Sequence[tuple[Generation, Generation]], readings: Mapping[Any, Reading], tolerance: float) -> TokenCheck:
    wrong, divergences, excess = [], [], dict[str, float]()
    for plain, other in pairs:
        control, own = readings[answer_key(plain)], readings[answer_key(other)]
        for position in np.flatnonzero(own.gap_T > tolerance * own.error_T).tolist():
            gap, least = float(own.gap_T[position]), tolerance * float(own.error_T[position])
            wrong.append(WrongToken(other.prompt_id, other.turn, position, other.tokens[position], gap, least))
        if (place := _first_difference(plain.tokens, other.tokens)) is not None:
            divergences.append(_divergence(plain, other, place, control, own, tolerance))
        more = float((own.gap_T / own.error_T).sum() - (control.gap_T / control.error_T).sum())
        excess[other.prompt_id] = excess.get(other.prompt_id, 0.0) + more
    others = [readings[answer_key(other)] for _, other in pairs]
    gap_N, error_N = (np.concatenate([np.zeros(0), *(each[column] for each in others)]) for column in (0, 1))
    return TokenCheck(
        num_answers=len(pairs),
        num_tokens=len(gap_N),
        largest_gap=float(gap_N.max(initial=0.0)),
        largest_gap_in_roundings=float((gap_N / error_N).max(initial=0.0)),
        tolerance=tolerance,
        off_share=float((gap_N > 0).mean()) if len(gap_N) else 0.0,
        p_value=sign_flip_p_value(list(excess.values())),
        wrong_tokens=wrong,
        divergences=divergences,
    )


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position at which two answers differ, the shorter one's length where it begins the other."""
    differing = (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return next(differing, None if len(one) == len(other) else min(len(one), len(other)))


def _divergence(
    plain: Generation, other: Generation, place: int, control: Reading, own: Reading, tolerance: float
) -> Divergence:
    # One may be the beginning of the other: a stop was missed or added, which rounding does not do.
    longer = max(plain.tokens, other.tokens, key=len)
    differ = place < min(len(plain.tokens), len(other.tokens))
    return Divergence(
        prompt_id=plain.prompt_id,
        turn=plain.turn,
        position=place,
        plain_token=(plain.tokens if differ else longer)[place],
        speculative_token=(other.tokens if differ else longer)[place],
        logit_gap=float(max(control.gap_T[place], own.gap_T[place])) if differ else NO_TIE,
        tie_tolerance=tolerance * float(own.error_T[place]) if differ else 0.0,
    )


# --- readings -------------------------------------------------------------------------------------------------------


def read_answers(target: Target, answers: Sequence[Generation], config: DecodeConfig = PLAIN) -> dict[AnswerKey, Reading]:
    """Read each answer in both dtypes; a rounding error below that of the median position counts as that.

    What changes the target's distribution in plain decoding as well, an int8 cache and penalties, is read as `config` has it.
    """
    every = {answer_key(answer): answer for answer in answers}
    readings: dict[AnswerKey, Reading] = {}
    with progress("checking the answers' tokens", 2 * len(every), "readings") as advance:
        own = {key: _likeliest(target, answer, config, advance) for key, answer in every.items()}
        with widened(target) as exact:
            for key, answer in every.items():
                readings[key] = _read(exact, answer, own.pop(key), config)
                advance(1)
    usual = _usual_error(target, readings.values())
    return {key: each._replace(error_T=np.maximum(each.error_T, usual)) for key, each in readings.items()}


class Likeliest(NamedTuple):
    """The target's likeliest tokens before each token of an answer, as it reads them in its own dtype."""

    tokens_TC: Tensor
    logits_TC: Tensor


class Reading(NamedTuple):
    """One answer as the target reads it in the wider dtype."""

    gap_T: Floats  # of the answer's tokens below the largest logit
    error_T: (
        Floats  # the root mean square by which likely tokens' logits, less the likeliest's, differ in the target's own dtype
    )
    largest: float  # logit


def answer_key(answer: Generation) -> AnswerKey:
    """Return by what the reading of an answer is found: equal answers to a request are read once."""
    return answer.prompt_id, answer.turn, tuple(answer.prompt_tokens), tuple(answer.tokens)


@torch.no_grad()
def _likeliest(target: Target, answer: Generation, config: DecodeConfig, advance: Callable[[int], None]) -> Likeliest | None:
    advance(1)
    if not answer.tokens:
        return None
    pieces = _logits_by_piece(target, answer, config)
    best = [piece_PV.topk(min(COMPARED_TOKENS, piece_PV.shape[1])) for piece_PV in pieces]
    return Likeliest(torch.cat([each.indices for each in best]), torch.cat([each.values for each in best]))


@torch.no_grad()
def _read(exact: Target, answer: Generation, own: Likeliest | None, config: DecodeConfig) -> Reading:
    if own is None:
        return Reading(np.zeros(0), np.zeros(0), 0.0)
    tokens_T1 = torch.tensor(answer.tokens, device=exact.device).unsqueeze(1)
    gaps, errors, largest = [], [], 0.0
    split = zip(_logits_by_piece(exact, answer, config), *(each.split(AT_ONCE) for each in (tokens_T1, *own)), strict=True)
    for logits_PV, tokens_P1, tokens_PC, own_PC in split:
        best_P = logits_PV.amax(-1)
        gaps.append((best_P - logits_PV.gather(1, tokens_P1).squeeze(1)).nan_to_num(NO_TIE, NO_TIE))
        shift_PC = own_PC.to(logits_PV) - logits_PV.gather(1, tokens_PC.to(logits_PV.device))
        shift_PC = (shift_PC - shift_PC[:, :1])[:, 1:].nan_to_num(0.0, 0.0, 0.0)  # an overflow excuses nothing
        errors.append(shift_PC.square().mean(1).sqrt())
        largest = max(largest, float(best_P.nan_to_num(0.0, 0.0).abs().max()))
    gap_T, error_T = (torch.cat(each).double().cpu().numpy() for each in (gaps, errors))
    return Reading(gap_T, error_T, largest)


def _logits_by_piece(target: Target, answer: Generation, config: DecodeConfig) -> Iterator[Tensor]:
    """Yield the logits `[P, V]` from which the tokens of an answer are chosen, `AT_ONCE` of them at a time."""
    prompt, tokens = answer.prompt_tokens, answer.tokens
    states_TD = answer_states(target, prompt, tokens, answer.media_prompt, config.kv_cache)
    for first, states_PD in zip(range(0, len(tokens), AT_ONCE), states_TD.split(AT_ONCE), strict=True):
        text, follows = [*prompt, *tokens[:first]], [tokens[first : first + len(states_PD) - 1]]
        counts = TextCounts.of(config, [text], [len(prompt)], target.vocab_size, target.device)
        after_1PV = None if counts is None else counts.along(torch.tensor(follows, dtype=torch.int64, device=target.device))
        yield penalised(head_logits(target.model, states_PD).unsqueeze(0), after_1PV)[0]


def _usual_error(target: Target, readings: Collection[Reading]) -> float:
    """Return the median rounding error, or that of the dtype where the two readings do not differ."""
    error_N = np.concatenate([np.zeros(0), *(each.error_T for each in readings)])
    measured = float(np.median(error_N)) if len(error_N) else 0.0
    return measured or torch.finfo(target.model.dtype).eps * max([1.0, *(each.largest for each in readings)])


# --- the target in a wider dtype ------------------------------------------------------------------------------------


@contextmanager
def widened(target: Target) -> Iterator[Target]:
    """Let the target run in float32 where it is in 16 bits, in float64 where it is in float32 and the device has float64.

    What stands outside the blocks is converted at once, a block's weights while it runs, so that it takes the memory of one
    block. A target that is spread is loaded anew.
    """
    dtype = target.model.dtype
    wider = torch.float32 if dtype in (torch.bfloat16, torch.float16) else widest_float(target.device)
    if dtype == wider:
        yield target
    elif target.spread_by is not None:
        yield load_target(target.spread_by.model_copy(update={"dtype": str(wider).removeprefix("torch.")}))
    else:
        layers = blocks(target.model)
        within = {id(each) for each in _floats(layers)}
        with ExitStack() as stack:
            stack.enter_context(_converted([each for each in _floats(target.model) if id(each) not in within], wider))
            for layer in layers:
                stack.enter_context(_converted_while_it_runs(layer, wider))
            yield target


def _floats(module: nn.Module) -> list[Tensor]:
    return [each for each in (*module.parameters(), *module.buffers()) if each.is_floating_point()]


@contextmanager
def _converted(tensors: Sequence[Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Hold these tensors' values in another dtype; the old ones come back, as they were, at the end."""
    before = [each.data for each in tensors]
    try:
        for each in tensors:
            each.data = each.data.to(dtype)
        yield
    finally:
        for each, data in zip(tensors, before, strict=True):
            each.data = data


@contextmanager
def _converted_while_it_runs(layer: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    running = ExitStack()
    hooks = [
        layer.register_forward_pre_hook(lambda *_: running.enter_context(_converted(_floats(layer), dtype)) and None),
        layer.register_forward_hook(lambda *_: running.close(), always_call=True),
    ]
    try:
        yield
    finally:
        running.close()
        for hook in hooks:
            hook.remove()


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
