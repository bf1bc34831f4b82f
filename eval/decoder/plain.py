"""Speculative decoding of one text on one page, as Leviathan et al. (2211.17192) and Chen et al. (2302.01318) print it.

A draft writes a few tokens, each from its own distribution q. The target reads them in one forward, which gives its
distribution p after every one of them. A draft x stays with probability min(1, p(x) / q(x)). The first one that does not is
replaced by a token from the residual, norm((p - q)+); where all stay the target adds a bonus token from p. Whatever the draft,
the text then follows p; at temperature 0 both distributions are one-hot, and the text is the target's greedy one.

Nothing imports this: it says what the decoder of this package does, which tests hold to it token by token. That one has
batches, caches that roll back, trees, other rules and a record of every round, and reads each token once.
G drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from configs.schema.decoding import DecodeConfig
from heads.sampling.draws import CounterRNG, Role, draw, token_probabilities

Model = Callable[[list[int]], Tensor]  # token ids to logits [T, V]; row t predicts the token after t + 1 of them


def decode(
    target: Model, draft: Model, prompt: Sequence[int], config: DecodeConfig, *, request: int, eos: Collection[int] = ()
) -> list[int]:
    """Continue a prompt and return the answer's tokens, an end of text included.

    Args:
        target, draft: models over one vocabulary.
        config: temperature, top_k, top_p, num_speculative_tokens, max_new_tokens and seed are read.
        request: the number that names the text's random numbers, each of which is used once (`heads.sampling.draws`).
        eos: tokens that end the answer.
    """
    rng = CounterRNG(config.seed, [request], torch.device("cpu"))
    tokens = list(prompt)
    p = token_probabilities(target(tokens)[-1], config)
    tokens.append(int(draw(p, rng.along(Role.TARGET, [len(tokens)], 1)[0, 0])))  # the prompt's own forward gives the first
    while tokens[-1] not in eos and (left := config.max_new_tokens - len(tokens) + len(prompt)) > 0:
        num_drafts = min(config.num_speculative_tokens, left - 1)  # one token of a round is the target's own
        start = [len(tokens)]
        uniform_G = rng.along(Role.DRAFT, start, num_drafts, start)[0]
        drafts, q_GV = propose(draft, tokens, uniform_G, config)
        p_KV = token_probabilities(target([*tokens, *drafts])[-num_drafts - 1 :], config)  # the one forward of the round
        num_accepted, token = verify(
            p_KV,
            q_GV,
            drafts,
            rng.along(Role.ACCEPT, start, num_drafts, start)[0],
            residual=rng.along(Role.RESIDUAL, start, 1)[0, 0],
            bonus=rng.along(Role.TARGET, start, num_drafts + 1)[0, num_drafts],
        )
        for committed in (*drafts[:num_accepted], token):
            tokens.append(committed)
            if committed in eos:
                break
    return tokens[len(prompt) :]


def propose(draft: Model, tokens: Sequence[int], uniform_G: Tensor, config: DecodeConfig) -> tuple[list[int], list[Tensor]]:
    """Return G drafts, one after another, and the distribution `[V]` that each was drawn from."""
    text, q_GV = list(tokens), []
    for uniform in uniform_G:
        q_GV.append(token_probabilities(draft(text)[-1], config))
        text.append(int(draw(q_GV[-1], uniform)))
    return text[len(tokens) :], q_GV


def verify(
    p_KV: Tensor, q_GV: Sequence[Tensor], drafts: Sequence[int], accept_G: Tensor, *, residual: Tensor, bonus: Tensor
) -> tuple[int, int]:
    """Return how many drafts stay, and the token after them.

    Args:
        p_KV: the target's distribution after the text and each draft, K = G + 1.
        accept_G, residual, bonus: independent uniforms in [0, 1), for the tests of the drafts and the token after them.
    """
    for i, token in enumerate(drafts):
        p, q = p_KV[i].double(), q_GV[i].double()
        if accept_G[i] * q[token] < p[token]:  # with probability min(1, p / q)
            continue
        rest = (p - q).clamp(min=0)
        return i, int(draw(rest if rest.sum() > 0 else p, residual))  # equal distributions up to rounding leave nothing
    return len(drafts), int(draw(p_KV[-1], bonus))
