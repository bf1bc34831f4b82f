"""The answers a report shows: who wrote what, and text that survives tokens smaller than a character."""

import dataclasses

from eval.decoder.records import Round
from eval.report.samples import pick_samples, spell_pieces


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
    generations = [make_generation([make_round(4, accepted)], prompt_id=f"p{accepted}") for accepted in (2, 0, 4, 1, 3)]
    texts = {(generation.prompt_id, 0): "why?" for generation in generations}
    samples = pick_samples([*generations, make_generation([], prompt_id="empty")], texts, as_bytes, 3)
    assert [sample["prompt_id"] for sample in samples["worst"]] == ["p0", "p1"]
    assert [sample["prompt_id"] for sample in samples["best"]] == ["p4", "p3"]
    assert samples["best"][0]["tokens_per_target_step"] == 5.0
