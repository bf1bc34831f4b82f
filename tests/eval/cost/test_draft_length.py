"""A cost rule fitted to measured rounds and to a report, and the probe that records confidences."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs.runtime.command import DONE, run_command
from configs.runtime.errors import InputError
from configs.runtime.loading import load_config
from configs.schema.base import Settings
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import EvalConfig
from eval.cost.draft_length import (
    ConfidenceProbe,
    DraftedRound,
    calibration_points,
    choose_stopping,
    expected_rate,
    fit_stopping,
    stopping_from_report,
)
from eval.decoder.decode import decode
from eval.evaluation import evaluate
from eval.fit_stopping import add_arguments, main
from eval.metrics.distributions import class_sums, describe_classes
from eval.report.schema import write_report
from heads.proposers.draft_length import CostRule, calibrated, tokens_per_millisecond
from heads.proposers.draft_lm import DraftLM
from heads.proposers.prompt_lookup import PromptLookup
from tests.support import family_checks
from tests.support.decoding import PROMPTS, head_proposer, requests_for
from tests.support.evaluations import report_in, tiny_evaluation
from tests.support.reports import REMOVED, changed

ROWS = [10.0, 10.0, 10.5, 11.0, 12.0]
TIMES = {"draft_step_milliseconds": 1.5, "target_step_milliseconds": ROWS, "round_milliseconds": 0.5}


def random_rounds(number=1500, num_drafts=4):
    """Rounds whose drafts are accepted as often as the square of their confidence; a round is easy or hard as a whole."""
    generator = torch.Generator().manual_seed(0)
    easy = torch.rand(number, 1, generator=generator) < 0.5
    noise = torch.rand(number, num_drafts, generator=generator)
    sure = torch.where(easy, 0.85 + 0.14 * noise, 0.15 + 0.4 * noise).double()
    stays = torch.rand(number, num_drafts, generator=generator) < sure**2
    accepted = stays.long().cumprod(1).sum(1).tolist()
    return [DraftedRound(confidences=tuple(row), num_accepted=n) for row, n in zip(sure.tolist(), accepted, strict=True)]


@pytest.fixture(scope="module")
def rounds():
    return random_rounds()


def test_the_calibration_is_the_acceptance_that_the_rounds_were_made_with(rounds):
    settings = fit_stopping(rounds, **TIMES)
    sure = torch.tensor([0.25, 0.4, 0.88, 0.95])
    torch.testing.assert_close(calibrated(settings.calibration, sure), sure**2, atol=0.05, rtol=0)
    judged = sum(min(round_.num_accepted + 1, 4) for round_ in rounds)
    assert settings.acceptance == pytest.approx(sum(round_.num_accepted for round_ in rounds) / judged)
    config = DecodeConfig(num_speculative_tokens=4, stopping=settings)
    assert DecodeConfig.model_validate(config.model_dump()) == config


def test_bins_that_fall_share_their_mean_by_counts():
    pairs = [(0.1, 0)] * 2 + [(0.3, 1)] * 3 + [(0.6, 1), (0.6, 0), (0.6, 0)] + [(0.9, 1)] * 2
    classes = describe_classes(class_sums(*torch.tensor(pairs).T, num_classes=4), ["accepted"])
    points = [(point.confidence, point.acceptance) for point in calibration_points(classes)]
    assert points == [pytest.approx(pair) for pair in ((0.1, 0.0), (0.3, 4 / 6), (0.6, 4 / 6), (0.9, 1.0))]


def test_the_price_of_time_stands_still_and_is_above_what_fixed_lengths_reach(rounds):
    settings = fit_stopping(rounds, **TIMES)
    confidences = torch.tensor([round_.confidences for round_ in rounds], dtype=torch.float64)
    price = settings.tokens_per_second / 1000
    assert expected_rate(settings, confidences) == pytest.approx(price, rel=1e-6)
    alive = calibrated(settings.calibration, confidences).cumprod(1)
    fixed = [
        float((1 + alive[:, :g].sum(1)).mean()) / (0.5 + g * 1.5 + ROWS[g]) for g in range(1, 5)
    ]  # what these rounds would take at each fixed length
    assert price > max(fixed) * 1.01
    assert tokens_per_millisecond(settings.model_copy(update={"tokens_per_second": None}), 4) < price


def test_the_rate_is_that_of_the_rule_played_through_round_by_round(rounds):
    settings = fit_stopping(rounds, **TIMES)
    tokens = milliseconds = 0.0
    for round_ in rounds[:60]:
        rule, steps, drafted, alive = CostRule(settings, 4), 0, 0, 1.0
        tokens += 1
        for sure in round_.confidences:
            decision = rule.decide(torch.tensor([[sure]], dtype=torch.float64))
            steps += 1
            if not decision.drafts_B:
                break
            drafted += 1
            alive *= float(calibrated(settings.calibration, torch.tensor([sure], dtype=torch.float64)))
            tokens += alive
            if not decision.continues_B:
                break
        milliseconds += 0.5 + 1.5 * steps + ROWS[drafted]
    confidences = torch.tensor([round_.confidences for round_ in rounds[:60]], dtype=torch.float64)
    assert expected_rate(settings, confidences) == pytest.approx(tokens / milliseconds)


def test_shorter_rounds_count_for_the_calibration(rounds):
    short = [DraftedRound(confidences=(0.5,), num_accepted=1)] * 200
    with_short, without = fit_stopping([*rounds, *short], **TIMES), fit_stopping(rounds, **TIMES)
    half = torch.tensor([0.5])
    assert calibrated(with_short.calibration, half) > calibrated(without.calibration, half) + 0.05
    assert with_short.acceptance > without.acceptance


def test_what_cannot_be_fitted_is_refused(rounds):
    with pytest.raises(ValueError, match="no round drafted anything"):
        fit_stopping([], **TIMES)
    with pytest.raises(ValueError, match="times of target steps on 1 to 5 rows are needed for rounds of 4 drafts, got 2"):
        fit_stopping(rounds, draft_step_milliseconds=1.0, target_step_milliseconds=[10.0, 11.0])


def test_the_times_add_up_to_those_of_the_report(report):
    settings = stopping_from_report(report)
    speed, acceptance = report.speed, report.acceptance
    rounds = acceptance.num_rounds * speed.repeats
    # Every round drafted three tokens: overhead, three draft steps and a target step on four rows are the whole time.
    each = settings.round_milliseconds + 3 * settings.draft_step_milliseconds + settings.target_step_milliseconds[3]
    assert each * rounds == pytest.approx(1000 * speed.decode_seconds_speculative)
    plain = 1000 * speed.phases_autoregressive.verify_seconds / speed.decode_tokens_autoregressive
    assert settings.target_step_milliseconds[0] == pytest.approx(plain)
    steps = settings.target_step_milliseconds
    assert [after - before for before, after in itertools.pairwise(steps)] == pytest.approx([(steps[3] - plain) / 3] * 3)
    assert len(steps) == 4


def test_a_head_that_drafts_all_in_one_forward_has_no_price_for_one_more(report):
    stepwise = stopping_from_report(report)
    settings = stopping_from_report(changed(report, {"draft.kind": "dflash"}))
    assert settings.draft_step_milliseconds == 0
    whole = stepwise.round_milliseconds + 3 * stepwise.draft_step_milliseconds
    assert settings.round_milliseconds == pytest.approx(whole)


def test_the_mean_acceptance_is_that_of_judged_drafts(report):
    classes = [each for each in report.acceptance.stopping_reliability if each.num_drafts]
    kept = sum(round(each.accepted * each.num_drafts) for each in classes)
    expected = kept / sum(each.num_drafts for each in classes)
    assert 0 < expected < 1
    assert stopping_from_report(report).acceptance == pytest.approx(expected)


def test_a_drafts_own_estimate_is_calibrated_where_it_makes_one(report):
    assert stopping_from_report(report).by == "distribution"
    with pytest.raises(InputError, match="makes no estimate"):
        stopping_from_report(report, "estimate")
    one = {"confidence_from": 0.3, "confidence_to": 0.4, "num_drafts": 30, "confidence": 0.35, "accepted": 0.2}
    other = one | {"confidence_from": 0.8, "confidence_to": 0.9, "num_drafts": 10, "confidence": 0.85, "accepted": 0.6}
    estimating = changed(report, {"acceptance.estimate_reliability": [one, other]})
    settings = stopping_from_report(estimating)
    points = [(point.confidence, point.acceptance) for point in settings.calibration]
    assert (settings.by, points, settings.acceptance) == ("estimate", [(0.35, 0.2), (0.85, 0.6)], pytest.approx(0.3))
    assert stopping_from_report(estimating, "distribution") == stopping_from_report(report)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"speed": None}, "no times"),
        ({"simulated": True}, "simulated"),
        ({"draft.lookups": ["prompt_lookup"]}, "drafted by prompt_lookup, so its times"),
        ({"decode.batch_size": 4}, "batches of 4"),
        ({"decode.temperature": 0.5, "decode.verification": "match"}, "likeliest drafts at temperature 0.5"),
        ({"decode.tree": {"kind": "static"}}, "decode.tree is set"),
        ({"decode.stopping": {"rule": "entropy"}}, "decode.stopping is set"),
        ({"acceptance.stopping_reliability": REMOVED}, "no stopping_reliability"),
        ({"prompts.failed": [{"prompt_id": "a", "mode": "m", "stop_reason": "error"}]}, "failed requests"),
    ],
)
def test_a_report_that_cannot_tell_is_refused_with_the_reason(report, changes, reason):
    with pytest.raises(InputError, match=reason):
        stopping_from_report(changed(report, changes))


def test_from_a_run_to_a_fitted_rule_to_a_run_that_shows_it(tiny_run, tmp_path):
    decode = {"num_speculative_tokens": 4, "max_new_tokens": 20, "batch_size": 1}
    config = tiny_evaluation(tiny_run, tmp_path / "fixed", num_prompts=4, decode=decode, baselines=[])
    assert evaluate(config) == 0
    stopping = stopping_from_report(report_in(config))
    # One machine's times of a toy say nothing; dear rows make the rule stop.
    stopping = stopping.model_copy(update={"target_step_milliseconds": [1.0, 1.4, 1.8, 2.2, 2.6], "round_milliseconds": 0.0})
    decode = config.decode.model_copy(update={"stopping": stopping})
    stopped = config.model_copy(update={"decode": decode, "output": str(tmp_path / "stopped")})
    assert evaluate(stopped) == 0
    report = report_in(stopped)
    assert report.lossless.verdict == "lossless"
    assert report.decode.stopping["rule"] == "cost"
    assert sum(report.acceptance.drafted_histogram[:4]) > 4  # answers' ends aside
    page = (tmp_path / "stopped" / "report.html").read_text()
    assert "When drafting stops" in page
    assert "When drafting stops" not in (tmp_path / "fixed" / "report.html").read_text()


def test_the_command_writes_a_config(report, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_report(Path("report.json"), report)
    argv = ["report.json", "--out", "stopping.yaml"]
    assert run_command(Settings, main, description="", argv=argv, add_arguments=add_arguments) == DONE
    assert capsys.readouterr().out == Path("stopping.yaml").read_text()
    assert load_config(EvalConfig, "stopping.yaml").decode.stopping == stopping_from_report(report)


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1))


def drafted_rounds(generation):
    """Rounds in which there was room for drafts, without the last of them."""
    return [round_ for round_ in generation.rounds if round_.drafted][:-1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_probe_notes_the_rounds_that_the_records_hold_and_changes_none(target, tiny_llama, temperature):
    draft = DraftLM(tiny_llama(seed=2), 64)
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=16, temperature=temperature)
    probe = ConfidenceProbe(draft)
    assert decode(target, requests_for(PROMPTS), config, probe)[0] == decode(target, requests_for(PROMPTS), config, draft)[0]
    together, num_recorded = probe.rounds, 0
    for request in requests_for(PROMPTS):
        probe = ConfidenceProbe(draft)
        (generation,), _ = decode(target, [request], config, probe)
        num_recorded += len(generation.rounds) - 1
        recorded = [(len(round_.drafted), round_.num_accepted) for round_ in drafted_rounds(generation)]
        assert [(len(round_.confidences), round_.num_accepted) for round_ in probe.rounds] == recorded
        assert {round_.num_accepted for round_ in probe.rounds} <= {round_.num_accepted for round_ in together}
    assert num_recorded - len(PROMPTS) <= len(together) <= num_recorded


def test_a_confidence_is_the_largest_probability_that_the_draft_gave_any_token(target, tiny_llama):
    model = tiny_llama(seed=2)
    probe = ConfidenceProbe(DraftLM(model, 64))
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=12)
    (generation,), _ = decode(target, requests_for(PROMPTS[:1]), config, probe)
    text = [*PROMPTS[0], generation.tokens[0]]
    for round_, noted in zip(drafted_rounds(generation), probe.rounds, strict=True):
        ids_BT = torch.tensor([[*text, *round_.drafted]])
        probs_TV = model(input_ids=ids_BT, use_cache=False).logits[0].softmax(-1)
        assert noted.confidences == pytest.approx(probs_TV[len(text) - 1 : -1].amax(-1).tolist(), abs=1e-5)
        text += round_.committed


def test_of_a_draft_that_makes_them_the_probe_notes_its_estimates(as_target):
    target = as_target(family_checks.tiny_target("llama"))
    probe = ConfidenceProbe(head_proposer("dspark", target.model))
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=12)
    (generation,), _ = decode(target, requests_for(PROMPTS[:1]), config, probe, measure_overlap=True)
    assert probe.by == "estimate"
    for round_, noted in zip(drafted_rounds(generation), probe.rounds, strict=True):
        judged = len(round_.distributions.estimate)
        assert noted.confidences[:judged] == pytest.approx(round_.distributions.estimate)


@pytest.mark.parametrize(("kind", "by"), [("draft_lm", "distribution"), ("dspark", "estimate")])
def test_a_rule_is_chosen_by_rounds_and_rows_measured_here(kind, by, tiny_llama, as_target, monkeypatch):
    target = as_target(family_checks.tiny_target("llama"))
    draft = DraftLM(tiny_llama(seed=2), 64) if kind == "draft_lm" else head_proposer(kind, target.model)
    loaded = SimpleNamespace(proposer=draft, metadata=SimpleNamespace(kind=kind))
    monkeypatch.setattr(
        "eval.cost.draft_length.row_seconds", lambda target, request, most: [0.001 * row for row in range(1, most + 1)]
    )
    config, requests = DecodeConfig(num_speculative_tokens=3, max_new_tokens=12), requests_for(PROMPTS)
    chosen = choose_stopping(target, loaded, requests, config)
    assert (chosen.by, chosen.target_step_milliseconds) == (by, pytest.approx([1, 2, 3, 4]))
    assert (chosen.draft_step_milliseconds > 0, chosen.round_milliseconds > 0) == (kind == "draft_lm", kind == "dspark")
    generations, _ = decode(target, requests, config.model_copy(update={"stopping": chosen}), draft)
    assert [each.tokens for each in generations] == [each.tokens for each in decode(target, requests, config, draft)[0]]


def test_lookups_have_no_distribution_and_leave_nothing_to_note(target):
    probe = ConfidenceProbe(PromptLookup(target.device))
    decode(target, requests_for(PROMPTS), DecodeConfig(num_speculative_tokens=3, max_new_tokens=16), probe)
    assert probe.rounds == []
