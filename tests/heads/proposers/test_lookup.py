"""The automaton knows what a search of the texts finds; lookups continue the longest match, and change no output."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.decoding import DecodeConfig
from eval.decoder.decode import decode
from heads.proposers import lookup as lookups
from heads.proposers.lookup import MAX_COUNTED, NOTHING, ROOT, PromptLookup, SuffixAutomaton, SuffixLookup
from tests.support.decoding import PROMPTS, requests_for

CPU = torch.device("cpu")
TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=4)


def grown(texts, order=None):
    """An automaton of some texts, a token at a time, in turns or one text after another; and where each text ends."""
    automaton, ends, places = SuffixAutomaton(), [ROOT] * len(texts), [0] * len(texts)
    for number in order or [number for number, text in enumerate(texts) for _ in text]:
        if places[number] < len(texts[number]):
            ends[number] = automaton.extend(ends[number], texts[number][places[number]])
            places[number] += 1
    return automaton, ends


def occurrences(texts, stretch):
    """Where a stretch ends, as (text, place after it)."""
    n = len(stretch)
    return [(t, end) for t, text in enumerate(texts) for end in range(n, len(text) + 1) if text[end - n : end] == stretch]


def naive_match(texts, query, *, followed=False):
    """The longest suffix of a query that occurs, and that something follows if asked for."""
    for length in range(len(query), 0, -1):
        found = occurrences(texts, query[len(query) - length :])
        if any(not followed or end < len(texts[t]) for t, end in found):
            return length
    return 0


@settings(deadline=None, max_examples=60)
@given(TEXTS, st.lists(st.integers(0, 2), max_size=8), st.booleans())
def test_matches_and_what_follows_them_are_those_that_a_search_finds(texts, query, in_turns):
    order = [number for _ in range(12) for number in range(len(texts))] if in_turns else None
    automaton, ends = grown(texts, order)
    match = NOTHING
    for place, token in enumerate(query):
        match = automaton.follow(match, token)
        assert match.length == naive_match(texts, query[: place + 1])
    assert automaton.continued(match).length == naive_match(texts, query, followed=True)
    assert len(automaton) <= 2 * sum(map(len, texts)) + 1
    for text, end in zip(texts, ends, strict=True):
        match = automaton.continued(automaton.longest(end))
        assert match.length == naive_match(texts, text, followed=True)
        if match.length == 0:
            continue
        stretch = text[len(text) - match.length :]
        after = [texts[t][place] for t, place in occurrences(texts, stretch) if place < len(texts[t])]
        following, _, share = automaton.most_frequent(match.state)
        assert after.count(following) == max(after.count(token) for token in after)
        assert share == pytest.approx(after.count(following) / len(after))


def test_one_token_repeated_costs_no_more_than_its_length():
    number = 20 * MAX_COUNTED
    automaton, (end,) = grown([[7] * number])
    assert len(automaton) == number + 1
    assert automaton.continued(automaton.longest(end)).length == number - 1


def drafts_for(text, num_tokens=4):
    lookup = SuffixLookup(CPU)
    lookup.start([text], 64, None)
    return lookup.look_up([text], num_tokens)[0]


@pytest.mark.parametrize(
    ("text", "drafted"),
    [
        ([1, 2, 3, 40, 41, 42, 43, 9, 3, 50, 51, 8, 1, 2, 3], [40, 41, 42, 43]),  # the longest match, not the latest
        (
            [5, 6, 30, 31, 0, 5, 6, 30, 32, 1, 5, 6, 30, 32, 2, 5, 6, 33, 3, 5, 6],
            [30, 32, 2, 5],
        ),  # the more frequent token, the latest of equals
        ([1, 2, 3, 4], []),
        ([1], []),
        ([1, 2, 3, 4, 5, 6, 7, 8, 1], [2, 3]),  # two drafts for a match of one
    ],
)
def test_suffix_lookup_follows_the_longest_match_by_count_in_proportion_to_its_length(text, drafted):
    assert drafts_for(text) == drafted


def test_a_draft_ends_where_it_becomes_unlikely(monkeypatch):
    text = [5, 6, 30, 31, 32, 33, 5, 6, 40, 41, 42, 43, 5, 6, 50, 51, 52, 53, 9, 5, 6]
    assert drafts_for(text) == [50, 51, 52, 53]
    monkeypatch.setattr(lookups, "MIN_SHARE", 0.4)
    assert drafts_for(text) == []


def test_an_earlier_answer_is_continued_where_it_matches_longer_and_the_oldest_are_forgotten(monkeypatch):
    lookup = SuffixLookup(CPU)
    lookup.learn([1, 2, 3, 40, 41, 42, 43])
    texts = [[3, 50, 8, 2, 3], [7, 1, 2, 3, 60, 61, 62, 63, 8, 7, 1, 2, 3]]
    lookup.start(texts, 64, None)
    assert lookup.look_up(texts, 4) == [[40, 41, 42, 43], [60, 61, 62, 63]]
    lookup.keep_rows([1])
    assert lookup.look_up([[*texts[1], 60]], 4) == [[61, 62, 63, 8]]
    monkeypatch.setattr(lookups, "MEMORY_TOKENS", 20)
    lookup = SuffixLookup(CPU)
    for start in (0, 10, 20):
        lookup.learn(range(start, start + 8))
    texts = [[99, 1, 2], [99, 21, 22]]
    lookup.start(texts, 64, None)
    assert lookup.look_up(texts, 4) == [[], [23, 24, 25, 26]]


def test_an_answer_that_was_learnt_is_copied_round_after_round(tiny_llama, as_target):
    target, config = as_target(tiny_llama(seed=1)), DecodeConfig(num_speculative_tokens=4, max_new_tokens=24)
    lookup = SuffixLookup(CPU)
    (first,), _ = decode(target, requests_for(PROMPTS[:1]), config, lookup)
    lookup.learn(first.tokens)
    (second,), _ = decode(target, requests_for(PROMPTS[:1]), config, lookup)
    assert first.tokens == second.tokens
    assert len(second.rounds) < len(first.rounds) / 2


@pytest.mark.parametrize(
    ("text", "shortest", "drafted"),
    [
        ([1, 2, 3, 4, 9, 1, 2], 2, [3, 4, 9]),
        ([1, 2, 3, 4, 9, 1, 2], 3, []),  # no match is as long
        ([8, 5, 6, 5, 6, 5], 1, [6, 5, 6]),  # the match runs into the end of the text, which repeats itself
    ],
)
def test_prompt_lookup_copies_from_a_match_that_is_long_enough_and_goes_on_with_what_repeats(text, shortest, drafted):
    lookup = PromptLookup(CPU, longest=4, shortest=shortest)
    lookup.start([text], 20, None)
    proposal = lookup.propose([text], 3, None, None, keep_logits=False)
    assert proposal.tokens_BG[0].tolist() == drafted
    assert proposal.num_drafted == [len(drafted)]
