"""The check that a server serves the target, made before anything that it writes is kept.

They are compared on a few questions: by log-probabilities, as for a target cache, or by what the server writes where it gives
none. P probed positions, V tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from configs.runtime.errors import InputError
from configs.schema.decoding import SamplingConfig
from distill.cache.format import RowLayout
from distill.cache.server_rows import PROBE_POSITIONS, check_serves, local_distribution
from distill.dataset.batches import Example
from distill.generation.server_completions import ServerWriter

logger = logging.getLogger("draftsmith")

PROBES = (
    "Name three colours.",
    "What is the sum of two and three?",
    "Write one sentence about the sea.",
    "Which animal barks?",
)


def check_server(writer: ServerWriter) -> None:
    """Raise `InputError` where a server's log-probabilities or tokens are not the target's, or it fails."""
    target = writer.target
    probes = [target.encode_chat([{"role": "user", "content": text}]) for text in PROBES]
    if writer.config.answers_as == "text":
        check_writes(writer, probes)
        return
    vocab_size = min(target.vocab_size, len(target.tokenizer))
    layout = RowLayout(kind="top_k", dtype="float32", width=1, vocab_size=vocab_size)
    check_serves(writer.server, target, layout, Example(tuple(probes[0]), 1))


@torch.no_grad()
def check_writes(writer: ServerWriter, probes: Sequence[Sequence[int]]) -> None:
    """Refuse a server whose greedy answer is not what the target finds likeliest: all that text alone can show.

    The target's log-probability of its own likeliest token is compared with that of the server's token, at each token of the
    first answer that can be read as token ids. The difference is 0 for the target itself and, unlike that of log-probabilities
    (`check_serves`), small for any model that mostly agrees with it.

    Raises:
        InputError: they differ by more than `server.probe_tolerance` nats on average, none can be read, or the server fails.
    """
    greedy = replace(writer, sampling=SamplingConfig(), config=writer.config.model_copy(update={"on_other_tokens": "drop"}))
    answers = ((ids, greedy.write(ids, 0, PROBE_POSITIONS).answer) for ids in probes)
    found = next(((ids, answer) for ids, answer in answers if not isinstance(answer, str)), None)
    url, target = writer.config.url, writer.target
    if found is None:
        raise InputError(
            f"server.url: {url} answered {len(probes)} prompts with text that, encoded anew, has other tokens than the server "
            "counts; use a server that answers with token ids (server.answers_as)"
        )
    prompt_ids, answer = found
    log_p_PV = local_distribution(target, target.vocab_size, Example((*prompt_ids, *answer), len(prompt_ids)))
    lost_P = log_p_PV.amax(-1) - log_p_PV.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
    difference, tolerance = float(lost_P.mean()), writer.config.probe_tolerance
    if not difference <= tolerance:
        raise InputError(
            f"server.url: {url} does not serve target {target.identity.name}: its greedy answer lies {difference:.3g} nats a "
            f"token below the target's own, and server.probe_tolerance allows {tolerance:g}"
        )
    logger.info("server %s writes what the target finds likeliest, up to %.3g nats a token", url, difference)
