"""The report: every field of the contract, computed from the records and from nothing else, and refused when malformed."""

import dataclasses
import json

import pytest

from configs.runtime.errors import InputError
from eval.decoder.records import SPECULATIVE, Round
from eval.report.samples import pick_samples, spell_pieces
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


# --- the answers it shows -------------------------------------------------------------------------------------------


def as_bytes(tokens):
    """Decode as a byte-level tokenizer does: one token, one byte."""
    return bytes(tokens).decode("utf-8", errors="replace")


def made_of(make_generation, prefill, *rounds):
    generation = make_generation(rounds)
    return dataclasses.replace(generation, tokens=(prefill, *generation.tokens[1:]))


def test_pieces_tell_who_wrote_what_in_reading_order(make_generation):
    round_ = Round(drafted=tuple(b"bcd"), num_accepted=1, committed=tuple(b"bX"))
    pieces = spell_pieces(made_of(make_generation, ord("a"), round_), as_bytes)
    assert [(piece["kind"], piece["text"]) for piece in pieces] == [
        ("prefill", "a"),
        ("accepted", "b"),
        ("rejected", "cd"),
        ("target", "X"),
    ]


def test_drafts_behind_the_end_of_the_text_are_not_shown_as_rejected(make_generation):
    round_ = Round(drafted=tuple(b"b!d"), num_accepted=2, committed=tuple(b"b!"))
    pieces = spell_pieces(made_of(make_generation, ord("a"), round_), as_bytes)
    assert [(piece["kind"], piece["text"]) for piece in pieces] == [("prefill", "a"), ("accepted", "b!")]


def test_a_character_split_between_draft_and_target_appears_whole_and_once(make_generation):
    first, second = "é".encode()
    round_ = Round(drafted=(first, ord("?")), num_accepted=1, committed=(first, second))
    pieces = spell_pieces(made_of(make_generation, ord("a"), round_, round_), as_bytes)
    assert "".join(piece["text"] for piece in pieces if piece["kind"] != "rejected") == "aéé"
    assert [piece["text"] for piece in pieces if piece["kind"] == "target"] == ["é", "é"]


def test_an_answer_that_stops_within_a_character_keeps_its_last_bytes(make_generation):
    round_ = Round(drafted=(), num_accepted=0, committed=("é".encode()[0],))
    pieces = spell_pieces(made_of(make_generation, ord("a"), round_), as_bytes)
    assert pieces[-1] == {"kind": "target", "text": "\N{REPLACEMENT CHARACTER}"}


def test_worst_and_best_are_the_ends_of_the_ranking_and_share_no_prompt(make_round, make_generation):
    generations = [
        make_generation([make_round(4, accepted)], prompt_id=f"p{accepted}", turn=accepted == 3) for accepted in (2, 0, 4, 1, 3)
    ]
    texts = {(generation.prompt_id, generation.turn): "why?" for generation in generations}
    samples = pick_samples([*generations, make_generation([], prompt_id="empty")], texts, as_bytes, 3)
    assert [sample["prompt_id"] for sample in samples["worst"]] == ["p0", "p1"]
    assert [sample["prompt_id"] for sample in samples["best"]] == ["p4", "p3, turn 2"]
    assert samples["best"][0]["tokens_per_target_step"] == 5.0
