"""What benchmarks share: requests decoded in batches, and counts by prompt as intervals take them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from configs.schema.decoding import DecodeConfig
from distill.dataset.conversations import Conversation
from eval.decoder.decode import Request, decode
from eval.decoder.records import Generation
from heads.frozen.loading import Target
from heads.proposers.protocol import Proposer

SEED = 0  # of all resampling
Counts = Sequence[tuple[int, int]]  # by prompt: committed tokens and rounds


def columns(counts: Counts) -> tuple[list[float], list[float]]:
    """Return committed tokens and rounds by prompt, as intervals take them."""
    return [float(committed) for committed, _ in counts], [float(rounds) for _, rounds in counts]


def to_request(row: Conversation) -> Request:
    return Request(prompt_id=f"{row.prompt_id}/{row.turn}", category=row.category, tokens=row.prompt_ids)


def decode_in_batches(
    target: Target, requests: Sequence[Request], settings: DecodeConfig, proposer: Proposer, *, what: str
) -> list[Generation]:
    """Decode requests `settings.batch_size` at a time; `what` names the draft where logits are not finite."""
    generations: list[Generation] = []
    for start in range(0, len(requests), settings.batch_size):
        generations += decode(target, requests[start : start + settings.batch_size], settings, proposer)[0]
    check_finite(generations, what)
    return generations


def check_finite(generations: Iterable[Generation], what: str) -> None:
    """Raise a RuntimeError, with the draft's name and the first prompt, where target or draft computed NaN or infinity."""
    failed = [generation.prompt_id for generation in generations if generation.stop_reason == "non_finite"]
    if failed:
        raise RuntimeError(f"{what}: the logits of target or draft are not finite on prompt {failed[0]}")
