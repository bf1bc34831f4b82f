"""Relaxed acceptance: a draft may stay for a token that stands for it as well. LOSSY.

Many codes of pictures and of sound are interchangeable, and a target that spreads its probability over them refuses drafts that
are as good as its own. Before a lossless rule judges a draft, probability is moved to it, at most `delta` in all, so that the
output follows p' in place of p with TV(p', p) <= delta.

- By neighbourhoods (LANTERN, 2410.03355) it comes from the codes nearest to the draft. `relaxed` makes p' of p and q alone. The
  paper judges each draft by a p' of its own; the output, which mixes them, may then lie further from p than delta.
- By tolerance (VADUSA, 2410.21951) a draft stays if any of several draws of the target's would have been it, or one of the
  codes nearest to it. No token is drawn in fact: `tolerant` is the distribution that the draws come to. With the draft's
  likeliest tokens and no table this is the paper's rule, in which a draft stays with probability 1 - (1 - p)^samples.
G drafts, K = G + 1, V vocabulary, N neighbours of a token; `...` any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from configs.runtime.errors import InputError, first_line
from configs.runtime.files import write_bytes
from configs.runtime.terminal import say
from configs.schema.decoding import DecodeConfig, NeighbourhoodAcceptance, NeighboursConfig, TolerantAcceptance
from eval.decoder.chain_rules import ChainVerification
from eval.decoder.tree_rules import CANDIDATE_RULES, CandidateChoice, CandidateRule
from eval.decoder.verifier import RULES, Verifier
from heads.proposers.protocol import Proposal
from heads.sampling.counter_rng import CounterRNG

TENSOR = "neighbours"  # of the table's file: token ids [V, N], the nearest first; a token that has none names itself
ChainRule = Callable[..., ChainVerification]  # as in `eval.decoder.chain_rules`
Move = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # as `relaxed`
AT_ONCE = 4096  # codes whose distances to all others are held at a time


class RelaxedVerifier(Verifier):
    """Verifies by the lossless rule of the settings without `lossy`, after moving probability to the drafts.

    Neighbourhoods judge drafts that were not drawn from a distribution, such as a lookup's beside another draft's, without
    loss; tolerance takes them for point masses.

    Raises:
        InputError: the table cannot be read, or has fewer than k neighbours.
    """

    def __init__(self, config: DecodeConfig, rng: CounterRNG) -> None:
        super().__init__(config, rng)
        lossy, device = cast(NeighbourhoodAcceptance | TolerantAcceptance, config.lossy), rng.requests_B.device
        strict = config.model_copy(update={"lossy": None}).rule
        none_VN = torch.empty((0, 0), dtype=torch.int64, device=device)
        near_VN = none_VN if lossy.table is None else read_table(lossy.table, lossy.k, device)
        self.takes_point_masses = isinstance(lossy, TolerantAcceptance)
        move = partial(tolerant, samples=lossy.samples) if isinstance(lossy, TolerantAcceptance) else relaxed
        if strict in RULES:
            self.chain_rule = step_rule(RULES[strict], near_VN, lossy.delta, move)
        else:
            self.candidate_rule = step_candidates(CANDIDATE_RULES[strict], near_VN, lossy.delta, move)

    def chain(
        self, logits_BKV: Tensor, proposal: Proposal, num_drafted: Sequence[int], lengths: Sequence[int]
    ) -> ChainVerification:
        if self.takes_point_masses and proposal.probs_BGV is None:  # the draft's likeliest tokens
            proposal = replace(proposal, by_lookup=[1] * len(num_drafted))
        return super().chain(logits_BKV, proposal, num_drafted, lengths)


def relaxed(p: Tensor, q: Tensor, near_VN: Tensor, delta: float) -> Tensor:
    """Return p' `[..., V]`: p with probability moved from tokens that q drafts too rarely to near ones it drafts too often.

    The nearest give first. A token gives no more than p - q and takes no more than q - p, so what is moved in all is TV(p', p);
    where that comes to more than delta, every transfer is scaled down alike.

    Args:
        p: the target's distributions `[..., V]`.
        q: those that the drafts were drawn from.
        near_VN: the nearest tokens of each.
        delta: the most that is moved, 0 to 1. With 0, p' is p to the bit.
    """
    spare, wanted, change = (p - q).clamp(min=0), (q - p).clamp(min=0), torch.zeros_like(p)
    for giver_V in fitting(near_VN, p).unbind(1):
        # What each would like of its neighbour, which may be that of several; they share what it has.
        asked = torch.minimum(wanted, spare[..., giver_V])
        asked_of = torch.zeros_like(p).index_add_(-1, giver_V, asked)
        share = (spare / asked_of.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1.0)
        taken, given = asked * share[..., giver_V], asked_of * share
        spare, wanted, change = (spare - given).clamp(min=0), wanted - taken, change + taken - given
    moved = change.clamp(min=0).sum(-1, keepdim=True)
    scale = (delta / moved.clamp(min=torch.finfo(p.dtype).tiny)).clamp(max=1.0)
    return (p + scale * change).clamp(min=0)


def tolerant(p: Tensor, q: Tensor, near_VN: Tensor, delta: float, *, samples: int) -> Tensor:
    """Return p' `[..., V]`: what follows where refused drafts stay by the target's draws.

    Token-wise rejection refuses a token with probability (q - p)+ in all, and puts one from (p - q)+ in its place. Of what is
    refused, a share comes back that is the chance that one of the draws is near; where that comes to more than delta in all, it
    is scaled down. It is taken from (p - q)+ evenly, and is TV(p', p).

    Args:
        p: the target's distributions `[..., V]`.
        q: those that the drafts were drawn from, point masses for the draft's likeliest.
        near_VN: the tokens that pass for each, besides itself; N may be 0.
        delta: the most that is moved, 0 to 1. With 0, p' is p to the bit.
        samples: draws; the first is the token that would take the draft's place.
    """
    refused, residual = (q - p).clamp(min=0), (p - q).clamp(min=0)
    tiny = torch.finfo(p.dtype).tiny
    total = residual.sum(-1, keepdim=True).clamp(min=tiny)
    by_first, by_others = torch.zeros_like(p), p  # chances that a draw is near a token; a refused one has no residual itself
    itself_V = torch.arange(p.shape[-1], device=p.device)
    for near_V in fitting(near_VN, p).unbind(1):
        other_V = near_V != itself_V
        by_first = by_first + residual[..., near_V] / total * other_V
        by_others = by_others + p[..., near_V] * other_V
    none_near = (1 - by_first).clamp(min=0) * (1 - by_others).clamp(min=0) ** (samples - 1)
    kept = refused * (1 - none_near)
    kept = kept * (delta / kept.sum(-1, keepdim=True).clamp(min=tiny)).clamp(max=1.0)
    return (p + kept - residual * (kept.sum(-1, keepdim=True) / total)).clamp(min=0)


def step_rule(rule: ChainRule, near_VN: Tensor, delta: float, move: Move = relaxed) -> ChainRule:
    """Return a rule for chains with `move` before it."""

    def verify(p_BKV: Tensor, q_BGV: Tensor, tokens_BG: Tensor, num_drafted_B: Tensor, *uniforms: Tensor) -> ChainVerification:
        p_BKV = _where_drafted(p_BKV, move(p_BKV[:, :-1], q_BGV, near_VN, delta), num_drafted_B)
        return rule(p_BKV, q_BGV, tokens_BG, num_drafted_B, *uniforms)

    return verify


def step_candidates(rule: CandidateRule, near_VN: Tensor, delta: float, move: Move = relaxed) -> CandidateRule:
    """Return a rule for several candidates with `move` before it; rows without a candidate keep their p."""

    def choose(p_BV: Tensor, q_BV: Tensor, tokens_BC: Tensor, num_candidates_B: Tensor, accept_BC: Tensor) -> CandidateChoice:
        judged_B1 = (num_candidates_B > 0).unsqueeze(1)
        p_BV = torch.where(judged_B1, move(p_BV, q_BV, near_VN, delta), p_BV)
        return rule(p_BV, q_BV, tokens_BC, num_candidates_B, accept_BC)

    return choose


def nearest_codes(codebook_CE: Tensor, num_neighbours: int, *, first_id: int, vocab_size: int) -> Tensor:
    """Return the token ids of the codes nearest to each token's, `[V, N]`, the nearest first; tokens that are no codes name
    themselves.

    Args:
        codebook_CE: the codes' vectors; code c is token `first_id + c`.
        num_neighbours: N, less than there are codes.
        first_id: token id of the first code.
        vocab_size: V.
    """
    table_VN = torch.arange(vocab_size).unsqueeze(1).repeat(1, num_neighbours)
    codebook_CE = codebook_CE.double()
    for start in range(0, len(codebook_CE), AT_ONCE):
        part_PE = codebook_CE[start : start + AT_ONCE]
        distances_PC = torch.cdist(part_PE, codebook_CE)
        own_P = torch.arange(start, start + len(part_PE))
        distances_PC[torch.arange(len(part_PE)), own_P] = float("inf")
        nearest_PN = distances_PC.topk(num_neighbours, largest=False).indices
        table_VN[first_id + own_P] = first_id + nearest_PN
    return table_VN


def _where_drafted(p_BKV: Tensor, changed_BGV: Tensor, num_drafted_B: Tensor) -> Tensor:
    """Return p with the rows of drafts that count replaced; the bonus token comes from p."""
    drafted_BG1 = (torch.arange(changed_BGV.shape[1], device=p_BKV.device) < num_drafted_B.unsqueeze(1)).unsqueeze(2)
    return torch.cat([torch.where(drafted_BG1, changed_BGV, p_BKV[:, :-1]), p_BKV[:, -1:]], 1)


def fitting(near_VN: Tensor, p: Tensor) -> Tensor:
    """Return the table with rows for the padding behind the vocabulary, if the target has some; refuse one of another size."""
    missing = p.shape[-1] - len(near_VN)
    if missing < 0:
        raise InputError(
            f"decode.lossy.table names the neighbours of {len(near_VN)} tokens, and the target has {p.shape[-1]}; make "
            "it with the target's vocab_size"
        )
    if not missing:
        return near_VN
    own_M1 = torch.arange(len(near_VN), p.shape[-1], device=p.device).unsqueeze(1)
    return torch.cat([near_VN, own_M1.expand(-1, near_VN.shape[1])])


@lru_cache(maxsize=8)
def read_table(path: str, k: int, device: torch.device) -> Tensor:
    """Return the k nearest of each token in a table's file, `[V, k]`."""
    remedy = "make one with eval/neighbours.py"
    try:
        table_VN = load_file(path)[TENSOR]
    except (OSError, SafetensorError, KeyError) as error:
        raise InputError(f"decode.lossy.table: {path} holds no table of neighbours: {first_line(error)}; {remedy}") from error
    if table_VN.ndim != 2 or table_VN.dtype != torch.int64 or not ((table_VN >= 0) & (table_VN < len(table_VN))).all():
        raise InputError(f"decode.lossy.table: {Path(path).name} must hold token ids [vocabulary, neighbours]; {remedy}")
    if k > table_VN.shape[1]:
        raise InputError(f"decode.lossy.k is {k}, and {path} has {table_VN.shape[1]} neighbours of each token; {remedy}")
    return table_VN[:, :k].to(device)


# --- making the table ---------------------------------------------------------------------------------------------


def write_table(config: NeighboursConfig) -> None:
    """Write the table that `eval/neighbours.py` was asked for.

    Raises:
        InputError: the codebook cannot be read, does not fit the vocabulary, or has too few codes.
    """
    codebook_CE = _read_codebook(config)
    if config.first_id + len(codebook_CE) > config.vocab_size:
        raise InputError(
            f"vocab_size is {config.vocab_size}, and {len(codebook_CE)} codes from token {config.first_id} on do not fit"
        )
    if config.k >= len(codebook_CE):
        raise InputError(f"k must be less than the codebook's {len(codebook_CE)} codes, got {config.k}")
    table_VN = nearest_codes(codebook_CE, config.k, first_id=config.first_id, vocab_size=config.vocab_size)
    write_bytes(Path(config.output), save({TENSOR: table_VN}))
    say(f"the {config.k} nearest of {len(codebook_CE)} codes: {config.output}")


def _read_codebook(config: NeighboursConfig) -> Tensor:
    path = Path(config.codebook)
    try:
        if path.suffix == ".npy":
            codebook = torch.from_numpy(np.load(path, allow_pickle=False))
        else:
            tensors = load_file(path)
            codebook = tensors[next(iter(tensors)) if config.tensor is None and len(tensors) == 1 else str(config.tensor)]
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise InputError(
            f"codebook: {path} holds no vectors as .npy or safetensors (tensor is {config.tensor}): {first_line(error)}"
        ) from error
    if codebook.ndim != 2 or not codebook.is_floating_point() or not torch.isfinite(codebook).all():
        raise InputError(f"codebook: {path} must hold finite numbers [codes, width], got {tuple(codebook.shape)}")
    return codebook
