"""The report: every field of the contract, computed from the records and from nothing else, and refused when malformed."""

import dataclasses
import json

import pytest

from configs.runtime.errors import InputError
from eval.decoder.records import SPECULATIVE
from eval.report.schema import load_report, write_report
from tests.support.reports import REMOVED, changed, report_of


def test_categories_and_prompts_pool_back_to_the_whole_and_plain_decoding_is_a_baseline_of_one(report):
    parts = list(report.by_category.values())
    assert sum(part.acceptance.num_tokens for part in parts) == report.acceptance.num_tokens
    assert sum(part.acceptance.num_rounds for part in parts) == report.acceptance.num_rounds
    assert sum(part.num_prompts for part in parts) == report.prompts.num_prompts == 32
    speedups = [part.speed.decode_speedup for part in parts]
    assert min(speedups) < report.speed.decode_speedup < max(speedups)
    committed, rounds = map(sum, zip(*report.acceptance.per_prompt.values(), strict=True))
    assert committed / rounds == report.acceptance.tokens_per_target_step
    plain = report.baselines["autoregressive"]
    assert plain.tokens_per_target_step == plain.decode_speedup == 1.0


def test_without_timings_there_is_no_speed_and_a_prompt_without_an_answer_is_asked_but_not_measured(report, report_inputs):
    untimed = report_of({**report_inputs, "timings": []})
    assert (untimed.speed, untimed.baselines["prompt_lookup"].decode_speedup) == (None, None)
    assert untimed.acceptance == report.acceptance
    lost = report_inputs["generations"][0].prompt_id
    kept = [generation for generation in report_inputs["generations"] if generation.prompt_id != lost]
    prompts = report_of({**report_inputs, "generations": kept, "timings": []}).prompts
    assert (prompts.num_prompts, prompts.num_asked) == (31, 32)


def test_equal_records_give_equal_reports_that_survive_the_disk(report, report_inputs, tmp_path):
    assert report_of(report_inputs) == report
    write_report(tmp_path / "report.json", report)
    assert load_report(tmp_path / "report.json") == report
    written = json.loads((tmp_path / "report.json").read_text())
    assert (written, next(iter(written))) == (report.to_dict(), "schema_version")


def test_a_failed_request_is_counted_listed_and_kept_in_the_numbers(report, report_inputs):
    broken = next(generation for generation in report_inputs["generations"] if generation.mode == SPECULATIVE)
    others = [generation for generation in report_inputs["generations"] if generation is not broken]
    failed = dataclasses.replace(broken, stop_reason="non_finite")
    with_failure = report_of({**report_inputs, "generations": [*others, failed]})
    assert [each.model_dump() for each in with_failure.prompts.failed] == [
        {"prompt_id": broken.prompt_id, "turn": 0, "mode": SPECULATIVE, "stop_reason": "non_finite"}
    ]
    assert (with_failure.prompts.num_prompts, with_failure.prompts.num_asked) == (31, 32)
    assert with_failure.acceptance.num_rounds == report.acceptance.num_rounds


def test_two_answers_to_one_prompt_and_answers_to_no_prompt_are_mistakes_of_the_caller(report_inputs):
    first, *others = report_inputs["generations"]
    with pytest.raises(ValueError, match="writing-0 was decoded twice in mode autoregressive"):
        report_of({**report_inputs, "generations": [first, *others, first]})
    strange = dataclasses.replace(first, prompt_id="unknown")
    with pytest.raises(ValueError, match="prompt unknown, turn 0 was decoded but is not among the prompts"):
        report_of({**report_inputs, "generations": [strange, *others]})


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("schema_version", 2, "schema_version 1"),
        ("draft", REMOVED, "draft: Field required"),
        ("acceptance.tokens_per_target_step", "1.5", "acceptance.tokens_per_target_step: Input should be a valid number"),
        ("acceptance.tokens_per_target_step_ci", [2.0, 1.0], r"must be \[low, high\]"),
    ],
)
def test_a_malformed_report_is_refused_by_name(report, path, value, sentence):
    with pytest.raises(InputError, match=sentence):
        changed(report, {path: value})
