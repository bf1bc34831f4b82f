"""What is measured of a trial: counts by position are the evaluator's, predictions the cost model's by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from configs.schema.commands.advising import AdviceConfig
from configs.schema.commands.planning import HardwareConfig
from configs.schema.decoding import DecodeConfig
from eval.decoder.decode import Request, decode
from eval.metrics.acceptance import Acceptance
from eval.report.sections import AnswerLength, TimedRound
from eval.stats.bootstrap import Interval
from heads.artifact import load_draft
from heads.frozen.loading import load_target
from scripts.advice.curve import DataCurve
from scripts.advice.findings import Findings
from scripts.advice.halving import Rung
from scripts.advice.measuring import PromptAcceptance, TrialMeasurement, TrialSpeed, count_positions, pool_forwards


def timed(drafts, batch):
    """A round whose drafts take 1 ms each, whatever else it does 10 ms; its work: 1 GB a draft, 10 GB a forward."""
    return TimedRound(
        num_speculative_tokens=drafts,
        batch_size=batch,
        context_tokens=64,
        draft_seconds=0.001 * drafts,
        draft_seconds_after_full=0.001 * drafts,
        verify_seconds=0.010,
        other_seconds=0.0,
        draft_bytes=1e9 * drafts,
        draft_flops=1.0,
        verify_bytes=1e10,
        verify_flops=1.0,
    )


@pytest.fixture
def measured():
    """Drafts of which the first is accepted in 60 of 100 rounds, the second in 30 of those 60."""
    prompts = [
        PromptAcceptance(prompt_id=str(number), committed=19, rounds=10, accepted=[kept, 3], judged=[10, kept])
        for number, kept in enumerate((4, 5, 6, 6, 6, 6, 6, 7, 7, 7))
    ]
    return TrialMeasurement(
        kind="eagle3",
        num_parameters=1,
        conversations=8,
        answer_tokens=100,
        prompts=prompts,
        answers=[AnswerLength(num_tokens=2, room_behind=100, num_answers=1)],
        context_tokens=64,
        sweep=[timed(drafts, batch) for batch in (1, 8) for drafts in (0, 1, 2)],
    )


def test_the_predicted_speedup_is_the_cost_models_by_hand(measured):
    speed = TrialSpeed(measured, AdviceConfig())
    assert speed.conditional == pytest.approx([0.6, 0.5])
    # Two tokens take two plain rounds. With a draft a round, a second one is needed where the first draft is refused.
    assert speed.speedup(1, 1).point == pytest.approx(2 * 10 / ((1 + 0.4) * 11), rel=1e-6)
    assert speed.speedup(2, 1).point == pytest.approx(2 * 10 / ((1 + 0.4) * 12), rel=1e-6)
    assert speed.best(1) == (1, pytest.approx(2 * 10 / (1.4 * 11), rel=1e-6))
    assert speed.draft_share(2, 1) == pytest.approx(0.2, rel=1e-6)
    interval = speed.speedup(1, 1)
    shares = [4 / 10, 7 / 10]  # of the worst and the best prompt
    low, high = (2 * 10 / ((2 - share) * 11) for share in shares)
    assert low < interval.low < interval.point < interval.high < high


def test_a_named_machine_is_predicted_from_the_work_and_its_bandwidth(measured):
    config = AdviceConfig(hardware=HardwareConfig(preset="h100_80gb", memory_gb_per_second=1000.0))
    assert TrialSpeed(measured, config).speedup(1, 1).point == pytest.approx(2 * 10 / (1.4 * 11), rel=1e-6)
    slow = AdviceConfig(hardware=HardwareConfig(preset="h100_80gb", tflops=1e-12))  # a FLOP a second: a second for each part
    assert TrialSpeed(measured, slow).speedup(1, 1).point == pytest.approx(2 * 1 / (1.4 * 2), rel=1e-6)


def test_what_slowed_one_sweep_s_forwards_decides_nothing_between_drafts(measured):
    def slowed(factor, verify):
        """All of a sweep slower by a factor, its rounds of 2 drafts by another one on top."""
        return [
            each.model_copy(
                update={
                    "draft_seconds": factor * each.draft_seconds,
                    "draft_seconds_after_full": factor * each.draft_seconds_after_full,
                    "verify_seconds": factor * each.verify_seconds * (verify if each.num_speculative_tokens == 2 else 1),
                }
            )
            for each in measured.sweep
        ]

    other_forward = [each.model_copy(update={"verify_bytes": 5e9, "verify_seconds": 0.002}) for each in measured.sweep]
    sweeps = {"slow": slowed(3.0, 1.1), "quiet": measured.sweep, "lucky": slowed(1.0, 0.5), "exit": other_forward}
    pooled = pool_forwards(sweeps)
    speedups = {
        name: TrialSpeed(measured.model_copy(update={"sweep": sweep}), AdviceConfig()).speedup(2, 1).point
        for name, sweep in pooled.items()
    }
    expected = TrialSpeed(measured, AdviceConfig()).speedup(2, 1).point
    assert [speedups[name] for name in ("quiet", "slow", "lucky")] == pytest.approx([expected] * 3, rel=1e-6)
    assert [each.draft_seconds for each in pooled["slow"]] == [each.draft_seconds for each in sweeps["slow"]]
    assert pooled["exit"] == other_forward  # of other work: it agrees with itself alone


def test_the_whole_training_is_predicted_from_the_curve_where_the_trial_saw_less(measured):
    rungs = [Rung(size=8, ranked=[(SimpleNamespace(name="head"), 1.0)], failed=[], not_begun=[])]
    tau = Interval(1.9 * 1.2, 1.9, 1.9 * 1.5)  # the trial's is 1.9
    curve = DataCurve(measured={}, exponent=Interval(0.1), predicted={400: tau}, check=None)

    def whole(curve, num_answer_tokens):
        return Findings(AdviceConfig(), {("head", 8): measured}, rungs, curve, num_answer_tokens).whole_training

    now = whole(None, 100)
    assert now == TrialSpeed(measured, AdviceConfig()).speedup(1, 1)
    more = whole(curve, 400)
    assert (more.point, more.low, more.high) == pytest.approx((1.2 * now.point, now.point, 1.5 * now.point))
    assert whole(None, 400) is None


def test_counts_by_position_are_the_evaluators(tiny_run):
    from configs.schema.target import TargetConfig

    target = load_target(TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"))
    draft = load_draft(str(tiny_run / "artifact"), target.identity, target.model)
    requests = [Request(prompt_id=str(n), category="", tokens=(n + 3, 2 * n + 5, 7)) for n in range(4)]
    generations = decode(
        target, requests, DecodeConfig(num_speculative_tokens=3, max_new_tokens=11), draft.proposer, mode="speculative"
    )[0]
    counts = count_positions(generations, 3)
    accepted, judged = (np.sum([getattr(each, name) for each in counts], axis=0) for name in ("accepted", "judged"))
    theirs = Acceptance(3, generations).summarise(samples=10, seed=0)
    assert (accepted / judged).tolist() == pytest.approx(theirs["position_conditional"])
    pooled = sum(each.committed for each in counts) / sum(each.rounds for each in counts)
    assert pooled == pytest.approx(theirs["tokens_per_target_step"])
