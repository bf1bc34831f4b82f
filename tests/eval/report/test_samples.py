"""Answers in pieces: who wrote what, in reading order, with whole characters."""

import dataclasses

import pytest

from eval.decoder.records import Round
from eval.report.samples import spell_pieces

FIRST, SECOND = "é".encode()


def as_bytes(tokens):
    """Decode as a byte-level tokenizer does: one token, one byte."""
    return bytes(tokens).decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    ("rounds", "pieces"),
    [
        ([(b"bcd", 1, b"bX")], [("accepted", "b"), ("rejected", "cd"), ("target", "X")]),
        ([(b"b!d", 2, b"b!")], [("accepted", "b!")]),  # what was drafted behind the end of the text was not rejected
        ([((FIRST, ord("?")), 1, (FIRST, SECOND))] * 2, [("rejected", "\N{REPLACEMENT CHARACTER}?"), ("target", "é")] * 2),
        ([((), 0, (FIRST,))], [("target", "\N{REPLACEMENT CHARACTER}")]),  # ended within a character
    ],
)
def test_pieces_tell_who_wrote_what_in_reading_order(make_generation, rounds, pieces):
    made = [Round(drafted=tuple(drafted), num_accepted=kept, committed=tuple(said)) for drafted, kept, said in rounds]
    generation = make_generation(made)
    generation = dataclasses.replace(generation, tokens=(ord("a"), *generation.tokens[1:]))
    found = [(piece["kind"], piece["text"]) for piece in spell_pieces(generation, as_bytes)]
    assert found == [("prefill", "a"), *pieces]
