"""Answers of a report in pieces of text, by who wrote them: the draft's accepted tokens, its rejected ones, the target's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from eval.decoder.records import Generation

Decode = Callable[[Sequence[int]], str]  # token ids -> text, special tokens included
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer gives for the first bytes of an unfinished character


def pick_samples(
    generations: Sequence[Generation], texts: Mapping[tuple[str, int], str], decode_tokens: Decode, a_side: int
) -> dict[str, list[dict[str, Any]]]:
    """Return `a_side` answers with the fewest and the most tokens per target step, token by token; the outermost come first.

    `texts` are what the user said, by prompt id and turn; later turns, counted from 1, are named with the prompt's id.
    """
    ranked = sorted((generation for generation in generations if generation.rounds), key=tau_of)
    count = min(a_side, len(ranked) // 2)
    return {
        side: [spell_sample(each, texts[each.prompt_id, each.turn], decode_tokens) for each in chosen]
        for side, chosen in (("worst", ranked[:count]), ("best", ranked[::-1][:count]))
    }


def spell_sample(generation: Generation, prompt: str, decode_tokens: Decode) -> dict[str, Any]:
    """Return an answer that has rounds, and the prompt's text, as the values of an `eval.report.schema.AnswerSample`."""
    name, turn = generation.prompt_id, generation.turn
    return {
        "prompt_id": f"{name}, turn {turn + 1}" if turn else name,
        "category": generation.category,
        "prompt": prompt,
        "tokens_per_target_step": tau_of(generation),
        "pieces": spell_pieces(generation, decode_tokens),
    }


def tau_of(generation: Generation) -> float:
    """Return an answer's tokens per target step."""
    return generation.num_committed / len(generation.rounds)


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
