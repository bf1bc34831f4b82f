"""The rule that ends a draft's chains, fitted for the benchmarks to rounds and forwards measured here."""

from __future__ import annotations

from collections.abc import Sequence

from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import CostStopping
from eval.cost.draft_length import fit_stopping
from eval.cost.tree_choice import row_seconds
from eval.decoder.decode import Request, decode
from eval.decoder.records import SPECULATIVE
from eval.metrics.acceptance import Acceptance
from eval.report.sections import AcceptanceSection
from heads.artifact import Draft
from heads.frozen.loading import Target


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
