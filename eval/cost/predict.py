"""The cost model's part of an evaluation: run the timing sweep, make the model, and return its predictions.

`prediction_of` makes the model from a report alone, for its own or another machine (`eval/predict.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import CostConfig
from eval.cost.model import AcceptanceProfile, CostModel, MeasuredCosts, RooflineCosts, RoundCosts, answer_lengths
from eval.cost.timing_sweep import sweep_rounds
from eval.decoder.records import Generation
from eval.report.schema import Report
from eval.report.sections import AnswerLength, PredictedSection, PredictedSpeedup, TimedRound
from heads.frozen.loading import Target
from heads.proposers.protocol import Proposer

log = logging.getLogger("draftsmith")

# Kinds of draft whose guess at a place is the same wherever the round began: they see the text alone, or with early_exit what
# the target's first blocks make of it, and none of the states that the whole target has only of what it has verified.
BY_TEXT_ALONE = frozenset(("draft_lm", "early_exit"))
BATCHES_SHOWN = (1, 2, 4, 8, 16, 32, 64)


def predict_speed(
    target: Target, proposer: Proposer, plain: Sequence[Generation], report: Report, decode: DecodeConfig, config: CostConfig
) -> PredictedSection | None:
    """Run the timing sweep and return the report's `speed.predicted`; None, and a warning, where no draft was accepted."""
    answers = answer_lengths(plain, decode.max_new_tokens)
    if not answers or not any(report.acceptance.position_conditional):
        log.warning("no draft was accepted in a run that was timed, so that no cost model can be made of it")
        return None
    placeholder = target.runner.placeholder  # forwards are timed on text: later rounds read neither images nor sounds
    text = [token for each in plain for token in (*each.prompt_tokens, *each.tokens) if token != placeholder]
    sweep = sweep_rounds(target, proposer, text, decode, config)
    if not sweep:
        log.warning("the draft proposed nothing in the timing sweep, so that no cost model can be made of it")
        return None
    model = _model(MeasuredCosts(sweep), report, sweep, answers)
    return predictions(model, sweep, answers, decode.num_speculative_tokens, decode.batch_size, mean_context(plain))


def predictions(
    model: CostModel, sweep: list[TimedRound], answers: list[AnswerLength], drafts: int, batch: int, context: int
) -> PredictedSection:
    """Return what a model says of the setting that was measured, and of others."""
    fastest, speedup = model.best(batch, context)
    return PredictedSection(
        context_tokens=context,
        settings=[
            PredictedSpeedup(
                num_speculative_tokens=each,
                batch_size=size,
                context_tokens=length,
                decode_speedup=model.speedup(each, size, length),
            )
            for length in sorted({context, *(each.context_tokens for each in sweep)})
            for size in sorted({batch, *BATCHES_SHOWN})
            for each in range(1, model.longest + 1)
        ],
        decode_speedup=model.speedup(drafts, batch, context) if drafts <= model.longest else None,
        best_num_speculative_tokens=fastest if speedup > 1 else None,
        break_even_batch_size=model.break_even_batch(context, max(each.batch_size for each in sweep)),
        sweep=sweep,
        answers=answers,
    )


def prediction_in(report: Report, where: str) -> PredictedSection:
    """Return a report's prediction; `where` names it in the error that says it has none."""
    predicted = None if report.speed is None else report.speed.predicted
    if predicted is None or not predicted.sweep:
        raise InputError(f"{where} holds no timing sweep; run eval/run.py with `cost` set in its config")
    return predicted


def prediction_of(
    report: Report, where: str, *, bytes_per_second: float | None = None, flops_per_second: float | None = None
) -> CostModel:
    """Return the cost model of a report, for its own machine, or for one with this bandwidth and speed."""
    predicted = prediction_in(report, where)
    if (bytes_per_second is None) != (flops_per_second is None):
        raise InputError("another machine is described by --bandwidth and --flops together; give both, or none for this one")
    costs: RoundCosts = MeasuredCosts(predicted.sweep)
    if bytes_per_second is not None and flops_per_second is not None:
        costs = RooflineCosts(predicted.sweep, bytes_per_second, flops_per_second)
    return _model(costs, report, predicted.sweep, predicted.answers)


def _model(costs: RoundCosts, report: Report, sweep: Sequence[TimedRound], answers: Sequence[AnswerLength]) -> CostModel:
    profile = AcceptanceProfile(report.acceptance.position_conditional, by_text_alone=report.draft.kind in BY_TEXT_ALONE)
    return CostModel(costs, profile, answers, max(each.num_speculative_tokens for each in sweep))


def mean_context(plain: Sequence[Generation]) -> int:
    """Return how many tokens stand before a committed one, on average over those that rounds committed."""
    lengths = [(len(each.prompt_tokens), len(each.tokens) - 1) for each in plain if len(each.tokens) > 1]
    total = sum(tokens * (prompt + (tokens + 1) / 2) for prompt, tokens in lengths)
    return round(total / sum(tokens for _, tokens in lengths))
