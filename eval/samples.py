"""The few answers a report shows: the prompts with the most and the fewest tokens per target step, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from eval.metrics import count_committed, was_cut
from eval.records import Generation

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer gives for the first bytes of an unfinished character


def pick_samples(
    generations: Sequence[Generation], texts: Mapping[str, str], decode_tokens: Callable[[Sequence[int]], str], count: int = 3
) -> dict[str, list[dict[str, Any]]]:
    """Return `{"worst": [...], "best": [...]}`, at most `count` each and none in both; the outermost come first.

    Args:
        generations: speculative ones; those without a single round have nothing to show.
        texts: the prompt's text by prompt id.
        decode_tokens: turns token ids into text.
        count: how many of each.
    """
    ranked = sorted((generation for generation in generations if generation.rounds), key=_tau)
    count = min(count, len(ranked) // 2)
    chosen = {"worst": ranked[:count], "best": ranked[::-1][:count]}
    return {name: [_sample(generation, texts, decode_tokens) for generation in some] for name, some in chosen.items()}


def _tau(generation: Generation) -> float:
    return count_committed(generation) / len(generation.rounds)


def _sample(generation: Generation, texts: Mapping[str, str], decode_tokens: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    return {
        "prompt_id": generation.prompt_id,
        "category": generation.category,
        "prompt": texts[generation.prompt_id],
        "tokens_per_target_step": _tau(generation),
        "pieces": spell_pieces(generation, decode_tokens),
    }


def spell_pieces(generation: Generation, decode_tokens: Callable[[Sequence[int]], str]) -> list[dict[str, str]]:
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
        if not was_cut(round_):  # drafts behind the end of the text were not rejected, they were not looked at
            yield "rejected", list(round_.drafted[round_.num_accepted :])
            yield "target", list(round_.committed[round_.num_accepted :])
