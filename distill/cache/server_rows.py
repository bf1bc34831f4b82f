"""The rows of a target cache from a server, and the check beforehand that it serves the target.

A cache belongs to the local target: the manifest names its tokenizer, chat template and weights, and a server reveals none of
these. So both compute one conversation before anything is stored, and the server is refused where its log-probabilities differ.
P probed positions, N rows, K kept tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from configs.runtime.errors import InputError
from distill.cache.format import RowLayout
from distill.cache.rows import as_kept, encode
from distill.dataset.batches import Example, collate
from distill.server.engine import EngineStates
from distill.server.logprobs import TargetServer
from distill.server.responses import TopK
from heads.frozen.hidden_states import read_states
from heads.frozen.loading import Target
from heads.inference.causal_lm import head_logits

logger = logging.getLogger("draftsmith")

PROBE_POSITIONS = 32
# The mass that float32 log-probabilities leave unaccounted for by rounding alone; a tail below it cannot be told from none.
ROUNDING = 1e-6


def server_rows(server: TargetServer, layout: RowLayout, examples: Sequence[Example]) -> Iterator[dict[str, Tensor]]:
    """Yield what is kept of each example, by name, on the CPU; for errors see `distill.server.logprobs.TargetServer.top_k`."""
    for found in server.top_k(examples, layout.width, layout.vocab_size):
        yield as_kept(layout, found.log_probs_NK, found.token_ids_NK, log_tail(found.log_probs_NK, layout.vocab_size))


def engine_rows(
    target: Target, layout: RowLayout, examples: Sequence[Example], *, chunk_size: int
) -> Iterator[dict[str, Tensor]]:
    """Yield what is kept of each example, by name, on the CPU, from servers of hidden states; for errors see `encode`."""
    assert isinstance(target.states_from, EngineStates)
    texts = [example.input_ids for example in examples]
    for example, states in zip(examples, target.states_from.of_each(texts, layout.taps or ()), strict=True):
        kept_T = slice(None) if layout.every_position else slice(example.answer_start - 1, -1)
        taps_ANE = [tap_1TE[0, kept_T] for tap_1TE in states.taps_ABTE]
        yield encode(target, layout, states.final_BTE[0, kept_T], chunk_size, taps_ANE)


def log_tail(log_probs_NK: Tensor, vocab_size: int) -> Tensor:
    """Return `[N]` the log mass of the tokens that a server does not list: 1 minus that of the others, at least `ROUNDING`.

    The local target sums the tail itself; here the other tokens are unknown. A mass of 0 would make the divergences that weigh
    it by the draft's mass (reverse KL, JSD) as large as `LOG_ZERO` for a rounding error; it is 0 only where K is V.
    """
    if log_probs_NK.shape[-1] == vocab_size:
        return torch.full_like(log_probs_NK[:, 0], -torch.inf)
    return (1 - log_probs_NK.exp().sum(-1)).clamp(min=ROUNDING).log()


@torch.no_grad()
def check_serves(server: TargetServer, target: Target, layout: RowLayout, example: Example) -> None:
    """Refuse a server whose log-probabilities at the last positions of a conversation are not the target's.

    Compared at the server's most likely token: the local distribution has every token, the server's only a few.

    Raises:
        InputError: on average they differ by more than `server.probe_tolerance` nats, or the server fails.
    """
    probe = example._replace(answer_start=max(1, len(example.input_ids) - PROBE_POSITIONS))
    (found,) = server.top_k([probe], layout.width, layout.vocab_size)
    log_p_PV = local_distribution(target, layout.vocab_size, probe)
    difference, num_agreeing = _compare(found, log_p_PV)
    tolerance, url = server.config.probe_tolerance, server.config.url
    agreement = f"the most likely tokens agree at {num_agreeing} of {len(log_p_PV)} positions"
    if not difference <= tolerance:  # also where it is no number
        raise InputError(
            f"server.url: {url} does not serve target {target.identity.name}: the log-probabilities of its most likely tokens "
            f"differ by {difference:.3g} nats on average, and server.probe_tolerance allows {tolerance:g}; {agreement}"
        )
    logger.info("server %s serves the target: off by %.3g nats on average, %s", url, difference, agreement)


@torch.no_grad()
def local_distribution(target: Target, vocab_size: int, example: Example) -> Tensor:
    """Return the target's own log-probabilities `[P, V]` before each label of an example, of the ids below `vocab_size`."""
    batch = collate([example]).to(target.device)
    states = read_states(target.model, batch.input_ids_BT, (), media=batch.media_inputs(target))
    hidden_PE = states.final_BTE[0, example.answer_start - 1 : -1]
    return head_logits(target.model, hidden_PE)[:, :vocab_size].float().log_softmax(-1).cpu()


def _compare(found: TopK, log_p_PV: Tensor) -> tuple[float, int]:
    """Return the mean |difference| in nats at the server's most likely tokens, and how many of them are the target's, too."""
    top1_P1 = found.token_ids_NK[:, :1]
    difference_P1 = log_p_PV.gather(1, top1_P1) - found.log_probs_NK[:, :1]
    return float(difference_P1.abs().mean()), int((log_p_PV.argmax(-1) == top1_P1[:, 0]).sum())
