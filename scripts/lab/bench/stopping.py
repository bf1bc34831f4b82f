"""The rule that ends a draft's chains, fitted for the benchmarks to rounds and forwards measured here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import CostStopping
from eval.cost.draft_length import fit_stopping
from eval.decoder.decode import Request, decode
from eval.decoder.records import SPECULATIVE
from eval.metrics.acceptance import Acceptance
from eval.report.sections import AcceptanceSection
from heads.artifact import Draft
from heads.frozen.hidden_states import forward_states
from heads.frozen.loading import Target
from heads.inference.causal_lm import head_logits, new_cache

TIMED_FORWARDS = 9  # by number of rows


def choose_stopping(target: Target, draft: Draft, requests: Sequence[Request], settings: DecodeConfig) -> CostStopping:
    """Return the cost rule's settings for a draft on this machine, by what it shows on prompts that are not judged."""
    decoded = [
        decode(target, [request], settings, draft.proposer, mode=SPECULATIVE, measure_overlap=True) for request in requests
    ]
    generations, timings = [each for own, _ in decoded for each in own], [timing for _, timing in decoded]
    summary = Acceptance(settings.num_speculative_tokens, generations).summarise(samples=1, seed=0)
    num_rounds = max(1, sum(timing.num_rounds for timing in timings))
    return fit_stopping(
        draft.metadata.kind,
        AcceptanceSection.model_validate(summary),
        drafting_milliseconds=1000 * sum(timing.draft_seconds for timing in timings) / num_rounds,
        row_milliseconds=[1000 * each for each in row_seconds(target, requests[0], settings.num_speculative_tokens + 1)],
    )


@torch.inference_mode()
def row_seconds(target: Target, request: Request, max_rows: int) -> list[float]:
    """Return the median seconds of the target's forward over 1, 2, ... `max_rows` rows that follow a prompt."""
    length = len(request.tokens)
    cache = new_cache(target.model, length + max_rows)
    ids_1T = torch.tensor([request.tokens], device=target.device)
    media = target.media_inputs([request.media_prompt], [request.tokens])
    forward_states(target.model, cache, ids_1T, [0], (), media=media)
    seconds: list[list[float]] = [[] for _ in range(max_rows)]
    for _ in range(TIMED_FORWARDS):
        for rows in range(1, max_rows + 1):
            ids_1K = ids_1T[:, -1:].expand(1, rows)
            started = time.perf_counter()
            states = forward_states(target.model, cache, ids_1K, [length], ())
            float(head_logits(target.model, states.final_BTE).amax())  # waits for the device
            seconds[rows - 1].append(time.perf_counter() - started)
    return [median(each) for each in seconds]
