"""How tokens are drawn: the distribution, drawing from it, and the random numbers, which are functions of counters.

Lossless verification needs the same processing of plain decoding's, the target's and the draft's logits, and the exact
distribution on the draft's side, so no other code turns logits into probabilities. Order: penalties, temperature,
top-k, top-p, min-p, as in transformers; vLLM takes min-p before top-k, which differs where top-p is set as well.

Each random number is a pure function of (seed, request, round, position, role). As with Philox and Threefry (Salmon et al., SC
2011) there is no state to advance, so a request gets the same numbers in any batch and order of work, and drafting, acceptance
and residual never share one, which would bias the output. The round is a coordinate of drafting and accepting: block
verification looks at every draft of a round before it keeps some, so given what it kept the numbers of the rejected ones are no
longer uniform, and the next round must not use them again at the same positions. The mixing function is the finaliser of
SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), applied once for each coordinate.
B rows, T tokens, G drafts, K = G + 1, V vocabulary, W the draft's; `...` any leading dimensions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from configs.schema.decoding import DecodeConfig, SamplingConfig
from heads.device import Rows, keeps_small_tensors_near, row_ints, row_tensor, to_device, upload, widest_float

NUCLEUS_CANDIDATES = 1024
BLOCK = 128  # logits whose largest is found first


def token_probabilities(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Return the probabilities `[..., V]` (float32) of logits `[..., V]` under `sampling`.

    Temperature 0 gives the one-hot distribution of the first largest logit. Top-p keeps the smallest set of most probable
    tokens that reaches p, and at least one. Both keep every token that ties with the last one kept: 16-bit logits tie often,
    and the distribution must not depend on how a sort orders ties. Min-p keeps the tokens that have at least this share of the
    largest probability.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, greedy_token(logits).unsqueeze(-1), 1.0)
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        smallest_kept = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    probs = logits.softmax(-1)
    if sampling.top_p is not None and sampling.top_p < 1:
        falling = _most_probable(probs, sampling.top_p)
        mass_before = falling.cumsum(-1) - falling
        smallest_kept = falling.masked_fill(mass_before >= sampling.top_p, 1.0).amin(-1, keepdim=True)
        probs = _at_least(probs, smallest_kept)
    return probs if sampling.min_p is None else _at_least(probs, sampling.min_p * probs.amax(-1, keepdim=True))


def _at_least(probs: Tensor, limit: Tensor) -> Tensor:
    """Return the distribution `[..., V]` of the tokens whose probability is not below a limit `[..., 1]`."""
    probs = probs.masked_fill(probs < limit, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def greedy_token(logits: Tensor) -> Tensor:
    """Return the first largest logit's index `[...]` of `[..., V]`; that of a NaN where there is one."""
    if not keeps_small_tensors_near(logits.device) or logits.shape[-1] % BLOCK:
        return logits.max(-1).indices
    # `argmax` and `max` of a row take a CPU six and two times as long: only `amax` is vectorised there.
    blocks = logits.unflatten(-1, (-1, BLOCK))
    block = blocks.amax(-1).max(-1, keepdim=True).indices.unsqueeze(-1)
    within = blocks.gather(-2, block.expand(*block.shape[:-1], BLOCK)).squeeze(-2).max(-1).indices
    return block.squeeze(-1).squeeze(-1) * BLOCK + within


def values_at(values: Tensor, index: Tensor) -> Tensor:
    """Return the value `[...]` at an index `[...]` of each row of `values` `[..., V]`."""
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw an index a row from unnormalised `weights` `[..., V]` by inverse transform sampling with `uniform` `[...]`."""
    return draw_with_replacement(weights, uniform.unsqueeze(-1)).squeeze(-1)


def draw_with_replacement(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw C independent indices a row from unnormalised `weights` `[..., V]` with `uniform` `[..., C]`.

    Sums are float64 where the device has it, and a token of weight 0 is never drawn. A row that sums to 0 or NaN gives
    arbitrary indices in range: the caller has to know such rows.
    """
    cumulated = weights.to(widest_float(weights.device)).cumsum(-1)
    total = cumulated[..., -1:].contiguous()
    drawn = torch.searchsorted(cumulated, (uniform * total).contiguous(), right=True)
    # The product can round up to the total; the last token that has weight then stands for it.
    last_with_weight = torch.searchsorted(cumulated, total, right=False)
    return torch.minimum(drawn, last_with_weight).clamp(max=weights.shape[-1] - 1)


def draw_without_replacement(probs_BV: Tensor, uniform_BC: Tensor) -> Tensor:
    """Return up to C distinct draws `[B, C]` a row, in order: each from the weights without the tokens drawn before it.

    Where there are fewer than C tokens, the columns beyond hold arbitrary ids in range, which the rule skips.
    """
    left_BV = probs_BV
    drawn = []
    for uniform_B in uniform_BC.unbind(1):
        token_B = draw(left_BV, uniform_B)
        left_BV = left_BV.scatter(-1, token_B.unsqueeze(-1), 0.0)
        drawn.append(token_B)
    return torch.stack(drawn, 1)


# How siblings of a sampled tree are drawn, C for one position; the rules of `eval.decoder.rules` are lossless for these.
DRAWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "with_replacement": draw_with_replacement,
    "without_replacement": draw_without_replacement,
    "k_seq": draw_with_replacement,
}


def _most_probable(probs: Tensor, mass: float) -> Tensor:
    """Return probabilities in descending order, all of them or at least as many as sum to `mass`."""
    # On a CPU, sorting a vocabulary takes longer than a small model's forward. On a GPU it does not, and the test would wait.
    if probs.device.type == "cpu" and probs.shape[-1] > NUCLEUS_CANDIDATES:
        values = probs.topk(NUCLEUS_CANDIDATES, dim=-1).values
        if bool((values.sum(-1) >= mass).all()):
            return values
    return probs.sort(dim=-1, descending=True).values


# --- random numbers -------------------------------------------------------------------------------------------------


def _signed(x: int) -> int:
    """Return the signed 64-bit integer with the same low 64 bits: torch has no unsigned arithmetic."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


class Role(IntEnum):
    """What a random number is for."""

    TARGET = 1  # a token from the target's own distribution: plain decoding, bonus, what a one-hot draft is compared with
    DRAFT = 2  # a token from the draft's distribution
    ACCEPT = 3  # the test whether a drafted token stays
    RESIDUAL = 4  # the token after a rejection


ROLES_OF_A_ROUND = {Role.DRAFT, Role.ACCEPT}


class ChainUniforms(NamedTuple):
    """The random numbers of a round of chains with G drafts."""

    draft_BG: Tensor
    accept_BG: Tensor
    residual_B1: Tensor
    target_BK: Tensor  # K = G + 1


class CounterRNG:
    """The random numbers of one decoding run; `requests` are the request's number for each batch row.

    Numbers are in [0, 1), in float64 where the device has it.
    """

    def __init__(self, seed: int, requests: Sequence[int], device: torch.device) -> None:
        self.seed, self.device = seed, device
        self.requests = list(requests)
        self._requests_B: Tensor | None = None  # the same on the device, once asked for

    def chain_bits(self, lengths: Sequence[int], num_drafts: int) -> np.ndarray:
        """Return the bits of a round's `ChainUniforms`, side by side, int64 `[B, 3 G + 2]` on the host."""
        counts = {Role.DRAFT: num_drafts, Role.ACCEPT: num_drafts, Role.RESIDUAL: 1, Role.TARGET: num_drafts + 1}
        return np.concatenate(
            [
                self._bits_along(role, lengths, count, lengths if role in ROLES_OF_A_ROUND else None)
                for role, count in counts.items()
            ],
            1,
        )

    def along(self, role: Role, first: Sequence[int], count: int, rounds: Sequence[int] | None = None) -> Tensor:
        """Return numbers `[B, count]` for the tokens at positions `first[b]`, `first[b] + 1`, ...; see `uniform` for the rest.

        They are computed on the host, where they cost no launches, and sent to the device.
        """
        bits_BT = self._bits_along(role, first, count, rounds)
        return upload(torch.from_numpy(bits_BT * 2.0**-53).to(widest_float(self.device)), self.device)

    def _bits_along(self, role: Role, first: Sequence[int], count: int, rounds: Sequence[int] | None) -> Any:
        requests_B, first_B = (np.array(each, dtype=np.int64) for each in (self.requests, first))
        round_B1 = None if rounds is None else np.array(rounds, dtype=np.int64)[:, None]
        return self._bits(role, requests_B, first_B[:, None] + np.arange(count), round_B1)

    def uniform(self, role: Role, positions_BT: Tensor, round_B1: Tensor | None = None) -> Tensor:
        """Return numbers by position of the token being decided, int64 on the device.

        `round_B1` is the round, as the position of its first draft, int64; required for drafting and accepting.
        """
        if self._requests_B is None:
            self._requests_B = to_device(self.requests, self.device)
        return self._bits(role, self._requests_B, positions_BT, round_B1).to(widest_float(self.device)) * 2.0**-53

    def _bits(self, role: Role, requests_B: Any, positions_BT: Any, round_B1: Any) -> Any:
        """Return the 53 random bits of each number, of tensors or of arrays."""
        state_B1 = _mix(_mix(requests_B + _signed(self.seed * _GAMMA)) + _signed(role * _GAMMA))[:, None]
        if round_B1 is not None:
            state_B1 = _mix(state_B1 + (round_B1 + 1) * _GAMMA)
        elif role in ROLES_OF_A_ROUND:
            raise ValueError(f"numbers for {role.name} belong to a round; say which")
        return _shift_right(_mix(state_B1 + (positions_BT + 1) * _GAMMA), 11)

    def at(self, device: torch.device) -> CounterRNG:
        """Return the same numbers for another device."""
        return CounterRNG(self.seed, self.requests, device)

    def keep_rows(self, rows: Rows) -> None:
        """Drop all rows but these, in this order."""
        kept = row_ints(rows, self.device)
        self.requests = [self.requests[row] for row in kept.host]
        self._requests_B = None if self._requests_B is None else self._requests_B[kept.tensor_B]

    def replace(self, row: int, request: int) -> None:
        """Give a row to another request."""
        self.requests[row], self._requests_B = request, None


def chain_uniforms(bits_BX: Tensor) -> ChainUniforms:
    """Return the numbers of `CounterRNG.chain_bits` on their device."""
    G = (bits_BX.shape[1] - 2) // 3
    return ChainUniforms(*(bits_BX.to(widest_float(bits_BX.device)) * 2.0**-53).split([G, G, 1, G + 1], 1))


def _mix(x: Any) -> Any:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Any, bits: int) -> Any:
    """Shift in zeros; torch's own shift of a negative number shifts in ones."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def request_number(name: str) -> int:
    """Return the 63-bit number that names a request's random numbers, the same in every process."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1


# --- penalties ------------------------------------------------------------------------------------------------------

# A repetition penalty (Keskar et al., 1909.05858; transformers' definition) divides the positive logits of all tokens of prompt
# and answer, and multiplies the negative ones. Presence and frequency penalties (OpenAI's, as in vLLM) are of the answer's
# tokens alone, and are taken off their logits: once, and for each time that a token was given. All come before the temperature.
# A draft counts for the positions behind it, so that speculative decoding samples by the distributions of plain decoding.


@dataclass(frozen=True, eq=False, kw_only=True)
class TextCounts:
    """How often each token stands in a text, and what that costs it."""

    penalties: DecodeConfig
    in_prompt: Tensor  # [..., V] bool, whether at all
    in_answer: Tensor  # [..., V] float32

    @classmethod
    def of(
        cls,
        penalties: DecodeConfig,
        texts: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> TextCounts | None:
        """Count texts `[B, V]`, each a prompt and its answer so far; None where nothing is penalised.

        Ids beyond the vocabulary, by which some families mark images, are left out.
        """
        if not penalties.penalises:
            return None
        ids_BT = row_tensor(texts, device, fill=vocab_size).clamp(max=vocab_size)
        is_prompt_BT = torch.arange(ids_BT.shape[1], device=device) < row_tensor([[each] for each in prompt_lengths], device)
        nothing_BV = torch.zeros(len(texts), vocab_size + 1, device=device)  # the last column is cut off
        prompt_BV, answer_BV = (nothing_BV.scatter_add(1, ids_BT, each.float()) for each in (is_prompt_BT, ~is_prompt_BT))
        return cls(penalties=penalties, in_prompt=prompt_BV[:, :-1] > 0, in_answer=answer_BV[:, :-1])

    def then(self, tokens_B: Tensor) -> TextCounts:
        """Return the counts `[B, V]` after another token of each answer."""
        tokens_B1 = tokens_B.unsqueeze(1)
        return replace(
            self, in_answer=self.in_answer.scatter_add(1, tokens_B1, torch.ones_like(tokens_B1, dtype=torch.float32))
        )

    def along(self, drafts_BG: Tensor) -> TextCounts:
        """Return the counts `[B, K, V]` after the texts and after each of their drafts."""
        drafted_BKV = self.in_answer.new_zeros(len(drafts_BG), drafts_BG.shape[1] + 1, self.in_answer.shape[-1])
        drafted_BKV[:, 1:].scatter_(2, drafts_BG.unsqueeze(2), 1.0)
        in_answer_BKV = self.in_answer.unsqueeze(1) + drafted_BKV.cumsum(1)
        return replace(self, in_prompt=self.in_prompt.unsqueeze(1), in_answer=in_answer_BKV)

    def among(self, ids_W: Tensor) -> TextCounts:
        """Return the counts `[..., W]` of some tokens."""
        return replace(self, in_prompt=self.in_prompt[..., ids_W], in_answer=self.in_answer[..., ids_W])

    def to(self, device: torch.device) -> TextCounts:
        return replace(self, in_prompt=self.in_prompt.to(device), in_answer=self.in_answer.to(device))


def penalised(logits: Tensor, counts: TextCounts | None) -> Tensor:
    """Return logits less their tokens' penalties; without counts as they are. A draft's may be of the first tokens only."""
    if counts is None:
        return logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scale = counts.penalties.repetition_penalty or 1.0
    once, each_time = (getattr(counts.penalties, name) or 0.0 for name in ("presence_penalty", "frequency_penalty"))
    in_prompt, in_answer = (each[..., : logits.shape[-1]] for each in (counts.in_prompt, counts.in_answer))
    was_given = in_answer > 0
    scaled = torch.where(logits > 0, logits / scale, logits * scale)
    return torch.where(in_prompt | was_given, scaled, logits) - each_time * in_answer - once * was_given
