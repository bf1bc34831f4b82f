"""Answers in pieces of text, by who wrote them: the draft's accepted tokens, its rejected ones, the target's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from eval.decoder.records import Generation

Decode = Callable[[Sequence[int]], str]  # token ids -> text, special tokens included
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer gives for the first bytes of an unfinished character


def spell_sample(generation: Generation, prompt: str, decode_tokens: Decode) -> dict[str, Any]:
    """Return an answer that has rounds, and the prompt's text, as JSON values."""
    return {
        "prompt_id": generation.prompt_id,
        "category": generation.category,
        "prompt": prompt,
        "tokens_per_target_step": generation.num_committed / len(generation.rounds),
        "pieces": spell_pieces(generation, decode_tokens),
    }


def spell_pieces(generation: Generation, decode_tokens: Decode) -> list[dict[str, str]]:
    """Return the answer as `{"kind", "text"}` pieces: `prefill`, `accepted`, `rejected`, `target`.

    The pieces but the rejected ones join to the whole answer's text. Each is spelled as the difference the tokens make to
    the text before them, since a token alone may be half a character; a character is shown with the token that completes it.
    """
    pieces: list[dict[str, str]] = []
    committed: list[int] = []
    shown = ""
    for kind, tokens in _runs(generation):
        text = decode_tokens([*committed, *tokens])
        new = text[len(shown) :]
        if kind != "rejected":
            committed += tokens
            new = new.rstrip(INCOMPLETE)
            shown += new
        if new:
            pieces.append({"kind": kind, "text": new})
    rest = decode_tokens(committed)[len(shown) :] if committed else ""
    return [*pieces, {"kind": "target", "text": rest}] if rest else pieces


def _runs(generation: Generation) -> Iterator[tuple[str, list[int]]]:
    """Yield (kind, tokens) in reading order, the rejected drafts of a round between its accepted ones and the target's."""
    yield "prefill", list(generation.tokens[:1])
    for round_ in generation.rounds:
        yield "accepted", list(round_.committed[: round_.num_accepted])
        if not round_.was_cut:  # drafts behind the end of the text were never judged, so they were not rejected
            yield "rejected", list(round_.drafted[round_.num_accepted :])
            yield "target", list(round_.committed[round_.num_accepted :])
