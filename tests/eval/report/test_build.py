"""The report: every field of the contract, computed from the records and from nothing else, and refused when malformed."""

import copy
import dataclasses
import json

import pytest

from configs.runtime.errors import InputError
from eval.decoder.records import SPECULATIVE, Divergence
from eval.report.build import build_report, write_report
from eval.report.definitions import DEFINITIONS
from eval.report.schema import Report, check_report, numbers_of, read_report

CONTRACT = {
    "acceptance": [
        "tokens_per_target_step",
        "tokens_per_target_step_ci",
        "tokens_per_target_step_macro",
        "accepted_per_round",
        "draft_token_yield",
        "position_conditional",
        "position_survival",
        "accepted_histogram",
        "drafted_histogram",
        "overlap_alpha",
        "overlap_alpha_by_position",
    ],
    "speed": [
        "decode_seconds_autoregressive",
        "decode_seconds_speculative",
        "decode_speedup",
        "decode_speedup_ci",
        "end_to_end_speedup",
        "repeats",
        "phases",
    ],
    "lossless": ["verdict", "checked_prompts", "divergences"],
    "prompts": ["source", "sha256", "ids", "num_prompts", "categories"],
    "draft": ["kind", "path", "sha256"],
    "baselines": ["autoregressive", "prompt_lookup"],
}


def test_every_field_of_the_contract_is_there_and_the_version_comes_first(report):
    assert next(iter(report)) == "schema_version"
    missing = {(section, name) for section, names in CONTRACT.items() for name in names if name not in report[section]}
    assert not missing
    assert report.keys() >= {"target", "decode", "hardware", "versions", "by_category"}


def test_the_interval_surrounds_its_number(report):
    acceptance, speed = report["acceptance"], report["speed"]
    for section, name in ((acceptance, "tokens_per_target_step"), (acceptance, "overlap_alpha"), (speed, "decode_speedup")):
        low, high = section[f"{name}_ci"]
        assert low < section[name] < high


def test_categories_pool_back_to_the_whole(report):
    parts = [section["acceptance"] for section in report["by_category"].values()]

    assert sum(part["num_tokens"] for part in parts) == report["acceptance"]["num_tokens"]
    assert sum(part["num_rounds"] for part in parts) == report["acceptance"]["num_rounds"]
    assert sum(section["num_prompts"] for section in report["by_category"].values()) == report["prompts"]["num_prompts"] == 32
    seconds = [section["speed"]["decode_seconds_speculative"] for section in report["by_category"].values()]
    assert sum(seconds) == pytest.approx(report["speed"]["decode_seconds_speculative"])


def test_counts_by_prompt_add_up_to_tau(report):
    committed, rounds = map(sum, zip(*report["acceptance"]["per_prompt"].values(), strict=True))

    assert committed / rounds == report["acceptance"]["tokens_per_target_step"]


def test_plain_decoding_is_a_baseline_of_one(report):
    plain = report["baselines"]["autoregressive"]

    assert plain["tokens_per_target_step"] == plain["decode_speedup"] == 1.0
    assert plain["decode_seconds"] == report["speed"]["decode_seconds_autoregressive"]


def test_equal_records_give_equal_reports(report, report_inputs):
    assert build_report(**report_inputs) == report


def test_it_survives_the_disk(report, tmp_path):
    write_report(tmp_path / "report.json", report)

    assert read_report(tmp_path / "report.json") == report


def test_a_failed_request_is_counted_listed_and_kept_in_the_numbers(report, report_inputs):
    broken = next(generation for generation in report_inputs["generations"] if generation.mode == SPECULATIVE)
    others = [generation for generation in report_inputs["generations"] if generation is not broken]
    failed = dataclasses.replace(broken, stop_reason="non_finite")

    with_failure = build_report(**{**report_inputs, "generations": [*others, failed]})

    assert with_failure["prompts"]["failed"] == [
        {"prompt_id": broken.prompt_id, "turn": 0, "mode": SPECULATIVE, "stop_reason": "non_finite"}
    ]
    assert (with_failure["prompts"]["num_prompts"], with_failure["prompts"]["num_asked"]) == (31, 32)
    assert with_failure["acceptance"]["num_rounds"] == report["acceptance"]["num_rounds"]


def test_a_prompt_without_an_answer_shows_as_asked_but_not_measured(report_inputs):
    lost = report_inputs["generations"][0].prompt_id
    kept = [generation for generation in report_inputs["generations"] if generation.prompt_id != lost]
    timed = [timing for timing in report_inputs["timings"] if timing.prompt_ids != (lost,)]

    prompts = build_report(**{**report_inputs, "generations": kept, "timings": timed})["prompts"]

    assert (prompts["num_prompts"], prompts["num_asked"]) == (31, 32)


def test_without_timings_speed_is_none_and_everything_else_stands(report, report_inputs):
    untimed = build_report(**{**report_inputs, "timings": []})

    assert untimed["speed"] is None
    assert untimed["baselines"]["prompt_lookup"]["decode_speedup"] is None
    assert untimed["acceptance"] == report["acceptance"]


def test_divergence_records_become_plain_values(report_inputs):
    divergence = Divergence(
        prompt_id="coding-1", position=4, plain_token=1, speculative_token=2, logit_gap=0.5, tie_tolerance=0.25
    )

    report = build_report(**{**report_inputs, "lossless": {**report_inputs["lossless"], "divergences": [divergence]}})

    assert report["lossless"]["divergences"][0]["logit_gap"] == 0.5


def test_two_answers_to_one_prompt_in_one_mode_are_a_mistake_of_the_caller(report_inputs):
    twice = [*report_inputs["generations"], report_inputs["generations"][0]]

    with pytest.raises(ValueError, match="2 generations of prompt writing-0 in mode autoregressive"):
        build_report(**{**report_inputs, "generations": twice})


def test_every_definition_defines_something_a_report_may_hold():
    schema = Report.model_json_schema()

    def fields(node):
        """The fields of a section, found behind references and beside `null`."""
        name = node.get("$ref", "").rpartition("/")[2]
        inner = [schema["$defs"][name]] if name else node.get("anyOf", [])
        return node.get("properties", {}) | {key: value for each in inner for key, value in fields(each).items()}

    for path in DEFINITIONS:
        node = schema
        for key in path.split("."):
            assert key in fields(node), path
            node = fields(node)[key]


def damaged(report, path, value):
    copied = copy.deepcopy(report)
    *parents, last = path.split(".")
    section = copied
    for key in parents:
        section = section[key]
    section[last] = value
    return copied


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("schema_version", 2, "has schema_version 2, this draftsmith reads 1"),
        ("acceptance.tokens_per_target_step", "1.5", "acceptance.tokens_per_target_step: Input should be a valid number"),
        ("acceptance.tokens_per_target_step", float("nan"), "finite number"),
        ("acceptance.tau", 1.5, "acceptance.tau: Extra inputs are not permitted"),
        ("acceptance.tokens_per_target_step_ci", [2.0, 1.0], r"must be \[low, high\]"),
        ("hardware.watts", float("inf"), "hardware.watts is inf"),
        ("lossless.verdict", "fine", "lossless.verdict: Input should be 'lossless'"),
    ],
)
def test_a_malformed_report_is_refused_by_name(report, path, value, sentence):
    with pytest.raises(InputError, match=sentence):
        check_report(damaged(report, path, value), "report.json")


@pytest.mark.parametrize("value", [[], {}, {"rows": []}, 3])
def test_what_is_no_report_at_all_is_called_so(value):
    with pytest.raises(InputError, match="is no report"):
        check_report(value, "report.json")


def test_a_refused_report_leaves_no_file(report, tmp_path):
    with pytest.raises(InputError):
        write_report(tmp_path / "report.json", damaged(report, "speed.decode_speedup", float("nan")))

    assert list(tmp_path.iterdir()) == []


def test_nothing_in_the_file_is_a_formatted_number(report):
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    paths = dict(numbers_of(report))
    assert paths["acceptance.position_survival.0"] == report["acceptance"]["position_survival"][0]
    assert "simulated" not in paths  # a truth value is no number
