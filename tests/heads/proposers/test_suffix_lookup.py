"""The automaton knows what a search of the texts finds; lookups continue the longest match by count, and change no output."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.decoding import DecodeConfig, SamplingConfig
from eval.decoder.decode import decode, generate
from heads.proposers.suffix_automaton import MAX_COUNTED, ROOT, Match, SuffixAutomaton
from heads.proposers.suffix_lookup import SuffixLookup
from heads.sampling.counter_rng import CounterRNG
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
def test_the_longest_match_is_the_one_that_a_search_finds(texts, query, in_turns):
    order = [number for _ in range(12) for number in range(len(texts))] if in_turns else None
    automaton, _ = grown(texts, order)
    match = Match(ROOT, 0)
    for place, token in enumerate(query):
        match = automaton.follow(match, token)
        assert match.length == naive_match(texts, query[: place + 1])
    assert automaton.continued(match).length == naive_match(texts, query, followed=True)
    assert len(automaton) <= 2 * sum(map(len, texts)) + 1


@settings(deadline=None, max_examples=60)
@given(TEXTS, st.booleans())
def test_what_follows_a_match_is_counted_as_a_search_counts_it(texts, in_turns):
    order = [number for _ in range(12) for number in range(len(texts))] if in_turns else None
    automaton, ends = grown(texts, order)
    for text, end in zip(texts, ends, strict=True):
        match = automaton.continued(automaton.longest(end))
        assert match.length == naive_match(texts, text, followed=True)
        if match.length == 0:
            continue
        stretch = text[len(text) - match.length :]
        after = [texts[t][place] for t, place in occurrences(texts, stretch) if place < len(texts[t])]
        following = automaton.most_frequent(match.state)
        assert after.count(following.token) == max(after.count(token) for token in after)
        assert following.share == pytest.approx(after.count(following.token) / len(after))


def test_among_equals_the_latest_wins():
    automaton, _ = grown([[1, 2, 3, 1, 2, 4], [1, 2, 3, 0, 1, 2, 4]])
    assert automaton.most_frequent(automaton.follow(Match(ROOT, 0), 2).state).token == 4
    automaton, _ = grown([[1, 2, 4], [1, 2, 3]])
    assert automaton.most_frequent(automaton.follow(Match(ROOT, 0), 2).state).token == 3


def test_one_token_repeated_costs_no_more_than_its_length():
    number = 20 * MAX_COUNTED
    automaton, (end,) = grown([[7] * number])
    assert len(automaton) == number + 1
    assert automaton.continued(automaton.longest(end)).length == number - 1


def propose(lookup, tokens, num_tokens=4):
    rng = CounterRNG(0, range(len(tokens)), CPU)
    proposal = lookup.propose(tokens, num_tokens, SamplingConfig(), rng, keep_logits=False)
    return [row[:count] for row, count in zip(proposal.tokens_BG.tolist(), proposal.num_drafted, strict=True)]


def drafts_for(text, num_tokens=4, **options):
    lookup = SuffixLookup(CPU, **options)
    lookup.start([text], 64, None)
    return propose(lookup, [text], num_tokens)[0]


def test_the_longest_match_is_continued_and_not_the_latest():
    assert drafts_for([1, 2, 3, 40, 41, 42, 43, 9, 3, 50, 51, 8, 1, 2, 3]) == [40, 41, 42, 43]


def test_the_more_frequent_continuation_wins_at_every_token():
    assert drafts_for([5, 6, 30, 31, 0, 5, 6, 30, 32, 1, 5, 6, 30, 32, 2, 5, 6, 33, 3, 5, 6], num_tokens=2) == [30, 32]


def test_a_draft_ends_where_it_becomes_unlikely():
    text = [5, 6, 30, 31, 32, 33, 5, 6, 40, 41, 42, 43, 5, 6, 50, 51, 52, 53, 9, 5, 6]
    assert drafts_for(text, min_share=0.4) == drafts_for([1, 2, 3, 4]) == drafts_for([1]) == []
    assert drafts_for(text, min_share=0.3) == [50, 51, 52, 53]


def test_a_draft_is_in_proportion_to_its_match():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1]
    assert drafts_for(text, num_tokens=6, drafts_per_matched=1.0) == [2]
    assert drafts_for(text, num_tokens=6, drafts_per_matched=2.5) == [2, 3, 4]
    assert drafts_for([*text, 2], num_tokens=6, drafts_per_matched=2.5) == [3, 4, 5, 6, 7]


def test_an_earlier_answer_is_continued_where_it_matches_longer_than_the_text_itself():
    lookup = SuffixLookup(CPU)
    lookup.learn([1, 2, 3, 40, 41, 42, 43])
    texts = [[3, 50, 8, 2, 3], [7, 1, 2, 3, 60, 61, 62, 63, 8, 7, 1, 2, 3]]
    lookup.start(texts, 64, None)
    assert propose(lookup, texts) == [[40, 41, 42, 43], [60, 61, 62, 63]]


def test_answers_without_their_prompts_are_remembered_from_batch_to_batch():
    lookup = SuffixLookup(CPU)
    prompts = [[11, 12, 13, 10], [21, 22, 20]]
    lookup.start(prompts, 64, None)
    propose(lookup, prompts)
    lookup.commit([0, 0], None)
    tokens = [[*prompts[0], 30, 31, 10, 30], [*prompts[1], 40, 41]]
    assert propose(lookup, tokens) == [[31, 10, 30, 31], []]
    lookup.commit([2, 0], None)
    lookup.keep_rows([1])
    propose(lookup, [[*tokens[1], 42]])
    lookup.commit([0], None)
    lookup.start([[9, 40, 41], [9, 12]], 64, None)
    assert propose(lookup, [[9, 40, 41], [9, 12]]) == [[42], []]
    assert [list(answer) for answer in lookup._answers] == [[10, 30, 31, 10, 30], [20, 40, 41, 42]]


def test_the_oldest_answers_are_forgotten_and_none_are_kept_where_none_may_be():
    lookup = SuffixLookup(CPU, memory_tokens=20)
    for start in (0, 10, 20):
        lookup.learn(range(start, start + 8))
    lookup.start([[99, 1, 2], [99, 21, 22]], 64, None)
    assert propose(lookup, [[99, 1, 2], [99, 21, 22]]) == [[], [23, 24, 25, 26]]
    forgetful = SuffixLookup(CPU, memory_tokens=0)
    forgetful.learn([1, 2, 3])
    forgetful.start([[9, 1, 2]], 64, None)
    assert propose(forgetful, [[9, 1, 2]]) == [[]]


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1))


def test_greedy_output_is_plain_greedy_output_with_an_empty_memory_and_with_a_full_one(target):
    plain = generate(target, PROMPTS, DecodeConfig(num_speculative_tokens=0, max_new_tokens=24))
    config = DecodeConfig(num_speculative_tokens=5, max_new_tokens=24, batch_size=4)
    lookup = SuffixLookup(CPU)
    assert [generate(target, PROMPTS, config, lookup) for _ in range(2)] == [plain] * 2


def test_an_answer_seen_before_is_copied_round_after_round(target):
    requests = requests_for(PROMPTS[:1])
    config = DecodeConfig(num_speculative_tokens=4, max_new_tokens=24)
    lookup = SuffixLookup(CPU, drafts_per_matched=8.0)
    (first,), _ = decode(target, requests, config, lookup)
    (second,), _ = decode(target, requests, config, lookup)
    assert first.tokens == second.tokens
    assert len(second.rounds) < len(first.rounds) / 2
