"""The automaton knows what a search of the texts finds; lookups draft by its counts, alone, before a draft and beside one.

The output is the plain answer whoever drafts, and nothing is lost for the others.
"""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig, StaticTree
from eval.decoder.decode import decode, generate
from heads.proposers import lookup as lookups
from heads.proposers import suffixes
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import MAX_BEHIND, LookupFirst, MergedDrafts, PromptLookup, SuffixLookup, merge
from heads.proposers.protocol import RoundInputs
from heads.proposers.suffixes import (
    MAX_COUNTED,
    MAX_SUFFIX,
    NEGLIGIBLE,
    NOTHING,
    OWN_WEIGHT,
    ROOT,
    SuffixAutomaton,
    automaton_of,
    interpolated,
)
from heads.sampling.draws import CounterRNG
from tests.support import family_checks as checks
from tests.support.decoding import PROMPTS, head_proposer, requests_for

CPU = torch.device("cpu")
TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=4)


def occurrences(texts, stretch):
    """Where a stretch ends, as (text, place after it)."""
    n = len(stretch)
    return [(t, end) for t, text in enumerate(texts) for end in range(n, len(text) + 1) if text[end - n : end] == stretch]


def naive_contexts(texts, query):
    """What follows the suffixes of a query in texts, those that end at the same places once: by length, the counts by token."""
    found = {}
    for length in range(1, min(len(query), MAX_SUFFIX) + 1):
        places = occurrences(texts, query[len(query) - length :])
        after = [texts[t][end] for t, end in places if end < len(texts[t])]
        if after:
            found[tuple(places)] = length, Counter(after)
    return sorted(found.values(), key=lambda each: each[0])


def naive_probabilities(own, past, query):
    """The mixture that `interpolated` makes, from the longest suffix down: what one leaves goes to those behind it."""
    orders = [(n, 1, counts, OWN_WEIGHT) for n, counts in naive_contexts([own], query)]
    orders += [(n, 0, counts, 1.0) for n, counts in naive_contexts(past, query)]
    probs, left = Counter(), 1.0
    for _, _, counts, weight in sorted(orders, key=lambda each: each[:2], reverse=True):
        total = weight * counts.total()
        for token, count in counts.items():
            probs[token] += left * total / (total + len(counts)) * count / counts.total()
        left *= len(counts) / (total + len(counts))
    return probs


@settings(deadline=None, max_examples=60)
@given(TEXTS, st.lists(st.integers(0, 2), min_size=1, max_size=14))
def test_probabilities_are_the_mixture_over_the_suffixes_of_the_text_in_itself_and_in_answers(texts, text):
    own, end, past, match = SuffixAutomaton(), ROOT, automaton_of(texts), NOTHING
    for token in text:
        end, match = own.extend(end, token), past.follow(match, token)
    found = interpolated(own.contexts(own.longest(end)), past.contexts(match))
    expected = naive_probabilities(text, texts, text)
    assert found == pytest.approx({token: expected.pop(token) for token in found}, abs=NEGLIGIBLE)
    assert expected.total() < NEGLIGIBLE
    assert sum(found.values()) < 1


def test_one_token_repeated_costs_no_more_than_its_length():
    number, automaton, end = 20 * MAX_COUNTED, SuffixAutomaton(), ROOT
    for _ in range(number):
        end = automaton.extend(end, 7)
    assert len(automaton) == number + 1
    assert [each.length for each in automaton.contexts(automaton.longest(end))] == list(range(MAX_SUFFIX, 0, -1))


def drafts_for(text, num_tokens=4, **options):
    lookup = SuffixLookup(CPU, **options)
    lookup.start([text], 64, None)
    return lookup.look_up([text], num_tokens)[0]


@pytest.mark.parametrize(
    ("text", "drafted"),
    [
        ([1, 2, 3, 40, 41, 42, 43, 9, 3, 50, 51, 8, 1, 2, 3], [40, 41, 42, 43]),  # a longer suffix has more weight
        ([5, 6, 30, 31, 0, 5, 6, 30, 32, 1, 5, 6, 30, 32, 2, 5, 6, 33, 3, 5, 6], [30, 32]),  # the more frequent token
        ([5, 6, 40, 41, 9, 5, 6, 50, 51, 5, 6], [50, 51, 5, 6]),  # the latest of equals
        ([1, 2, 3, 4], []),
        ([1], []),
    ],
)
def test_suffix_lookup_drafts_the_likeliest_token_by_the_counts(text, drafted):
    assert drafts_for(text)[: len(drafted)] == drafted
    assert bool(drafts_for(text)) == bool(drafted)


def test_a_draft_ends_where_it_becomes_unlikely_and_is_not_made_where_too_few_would_be_accepted(monkeypatch):
    text = [5, 6, 30, 31, 32, 33, 5, 6, 40, 41, 42, 43, 5, 6, 50, 51, 52, 53, 9, 5, 6]
    first = naive_probabilities(text, [], text)[50]
    second = first * naive_probabilities(text, [], [*text, 50])[51]
    monkeypatch.setattr(suffixes, "MIN_PROBABILITY", second - 1e-9)
    assert drafts_for(text) == [50, 51]
    assert drafts_for(text, min_expected=first + second - 1e-9) == [50, 51]
    assert drafts_for(text, min_expected=first + second + 1e-9) == []
    monkeypatch.setattr(suffixes, "MIN_PROBABILITY", first + 1e-9)
    assert drafts_for(text) == []


def test_earlier_answers_are_continued_and_the_oldest_learnt_are_forgotten_but_not_those_known(monkeypatch):
    lookup = SuffixLookup(CPU)
    lookup.learn([1, 2, 3, 40, 41, 42, 43])
    texts = [[3, 50, 8, 2, 3], [7, 1, 2, 3, 60, 61, 62, 63, 8, 7, 1, 2, 3]]
    lookup.start(texts, 64, None)
    first, second = lookup.look_up(texts, 3)
    assert (first[:1], second) == ([40], [60, 61, 62])
    lookup.keep_rows([1])
    assert lookup.look_up([[*texts[1], 60]], 3) == [[61, 62, 63]]
    monkeypatch.setattr(lookups, "MEMORY_TOKENS", 20)
    lookup = SuffixLookup(CPU, [range(30, 38)])
    for start in (0, 10, 20):
        lookup.learn(range(start, start + 8))
    texts = [[99, 1, 2], [99, 21, 22], [99, 31, 32]]
    lookup.start(texts, 64, None)
    assert lookup.look_up(texts, 2) == [[], [23, 24], [33, 34]]


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
    lookup.start([[7, 7, 7], text], 20, None)
    lookup.look_up([[7, 7, 7], text[:-1]], 3)
    lookup.keep_rows([1])  # the other text has ended
    proposal = lookup.propose(RoundInputs.of([text], CounterRNG(0, [0], CPU)), 3, None, keep_logits=False)
    assert proposal.tokens_BG[0].tolist() == drafted
    assert proposal.num_drafted.host == [len(drafted)]


# --- several drafts as one ------------------------------------------------------------------------------------------

GREEDY = DecodeConfig(num_speculative_tokens=3, max_new_tokens=24, batch_size=3)
REPEATING = [[7, 12, 3, 7, 12], [20, 9, 9, 31, 5, 6, 20, 9], [40, 11, 12, 3]]
BY_CLASS = ("model", "medusa", "eagle3", "peagle", "dflash", "xpress", "early_exit")  # one of each proposer's class
CHAINS = StaticTree(kind="static", branching=[1, 1, 1])


@pytest.fixture(scope="module")
def target(as_target):
    return as_target(checks.tiny_target("llama"))


# --- a lookup before a draft --------------------------------------------------------------------------------------


class Sometimes:
    """A lookup that knows the answers, right or wrong in its last token, in some rounds: the same of all rows, or by turns."""

    taps = ()

    def __init__(self, texts, device, every=2, wrong=False, by_turns=True):
        self.texts, self.device, self.every, self.wrong, self.by_turns = texts, device, every, wrong, by_turns

    def start(self, tokens, capacity, states):
        self.rounds = [place * self.by_turns for place, _ in enumerate(tokens)]

    def look_up(self, tokens, num_tokens):
        drafts = []
        for place, row in enumerate(tokens):
            self.rounds[place] += 1
            text = next(text for text in self.texts if text[: len(row)] == list(row))
            drafted = text[len(row) : len(row) + num_tokens] if self.rounds[place] % self.every else []
            drafts.append([*drafted[:-1], *((token + 1) % 64 for token in drafted[-1:])] if self.wrong else drafted)
        return drafts

    def commit(self, num_accepted, states):
        pass

    def keep_rows(self, rows):
        self.rounds = [self.rounds[row] for row in rows.host]


@pytest.fixture(scope="module")
def texts(target):
    answers = generate(target, REPEATING, GREEDY.model_copy(update={"num_speculative_tokens": 0, "max_new_tokens": 120}))
    return [[*prompt, *answer] for prompt, answer in zip(REPEATING, answers, strict=True)]


def watched(draft):
    """Return a draft, and a list that takes each row's text and logits whenever it proposes."""
    seen, propose = [], draft.propose

    def proposing(inputs, *others, keep_logits):
        proposal = propose(inputs, *others, keep_logits=True)
        rows = zip(inputs.tokens, proposal.logits_BGV, proposal.num_drafted.host, strict=True)
        seen.extend((list(row), logits_GV[:count].clone()) for row, logits_GV, count in rows if count)
        return proposal

    draft.propose = proposing
    return draft, seen


@pytest.mark.parametrize(
    ("name", "wrong", "by_turns"),
    [
        *((name, True, True) for name in BY_CLASS),
        ("model", False, True),
        ("eagle3", True, False),
        ("mtp", False, False),
    ],
)
def test_the_drafts_after_a_round_of_the_lookups_are_those_of_a_draft_that_read_the_text_at_once(
    target, texts, tiny_llama, name, wrong, by_turns
):
    """A fresh proposer that starts from the same text must compute the same, whatever was drafted for it before."""
    (draft, drafted), (fresh, expected) = (
        watched(DraftLM(tiny_llama(seed=2), 64) if name == "model" else head_proposer(name, target.model)) for _ in range(2)
    )
    both = LookupFirst(Sometimes(texts, target.device, every=3, wrong=wrong, by_turns=by_turns), draft, 64)
    generations, _ = decode(target, requests_for(REPEATING), GREEDY, both)
    assert [[*prompt, *each.tokens] for prompt, each in zip(REPEATING, generations, strict=True)] == [
        text[: len(prompt) + 24] for prompt, text in zip(REPEATING, texts, strict=True)
    ]
    assert len(drafted) > 3
    for text, logits in drafted:
        expected.clear()
        decode(target, requests_for([text[:-1]]), GREEDY.model_copy(update={"max_new_tokens": 5}), fresh)
        (again, others), *_ = expected
        assert again == text
        torch.testing.assert_close(logits[: len(others)], others[: len(logits)])


def test_the_draft_is_not_run_in_rounds_of_the_lookup_and_keeps_up_with_a_long_copy(target, texts):
    draft, runs = head_proposer("eagle3", target.model), []
    propose = draft.propose
    draft.propose = lambda inputs, *others, **named: runs.append(inputs.lengths.host[0]) or propose(inputs, *others, **named)
    both = LookupFirst(Sometimes(texts, target.device, every=10**9), draft, 64)
    config = GREEDY.model_copy(update={"max_new_tokens": 100})
    generations, _ = decode(target, requests_for(REPEATING[:2]), config, both)
    assert all(
        text[len(each.prompt_tokens) :][:100] == list(each.tokens) for text, each in zip(texts, generations, strict=False)
    )
    assert len(runs) == 1
    assert runs[0] >= MAX_BEHIND


# --- merged trees -------------------------------------------------------------------------------------------------

trees = st.integers(0, 6).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 2), min_size=n, max_size=n), st.tuples(*(st.integers(-1, draft) for draft in range(n)))
    )
)


def ways(tokens, parents):
    found = [()]
    for token, parent in zip(tokens, parents, strict=True):
        found.append(None if parent < 0 or found[parent] is None else (*found[parent], token))
    return [way for way in found[1:] if way is not None]


@given(st.lists(trees, min_size=2, max_size=4))
@settings(max_examples=100, deadline=None)
def test_a_merged_tree_holds_the_ways_of_all_and_each_once(given_trees):
    tokens, parents = merge(given_trees)
    assert all(0 <= parent <= draft for draft, parent in enumerate(parents))
    merged = ways(tokens, parents)
    assert len(set(merged)) == len(merged)
    assert set(merged) == {way for tree in given_trees for way in ways(*tree)}


def test_the_better_draft_is_followed_wherever_it_stands_and_the_other_loses_nothing(target, tiny_llama):
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=17, tree=CHAINS)
    both = MergedDrafts([DraftLM(tiny_llama(seed=2), 64), DraftLM(target.model, 64)], target.device)
    generations, _ = decode(target, requests_for(REPEATING), config, both)
    assert all(round_.num_accepted == 3 for generation in generations for round_ in generation.rounds)
    assert any(round_.ranks[0] == 1 for generation in generations for round_ in generation.rounds)


def test_merging_at_a_temperature_is_matched_and_never_drawn(target, tiny_llama):
    merged = MergedDrafts([DraftLM(tiny_llama(seed=2), 64), head_proposer("eagle3", target.model)], target.device)
    config = GREEDY.model_copy(update={"tree": CHAINS, "temperature": 1.0})
    plain = generate(target, REPEATING, config.model_copy(update={"num_speculative_tokens": 0}))
    assert generate(target, REPEATING, config.model_copy(update={"verification": "one_hot"}), merged) == plain
    with pytest.raises(InputError, match="verification"):
        generate(target, REPEATING, config, merged)
    with pytest.raises(InputError, match="set tree"):
        generate(target, REPEATING, config.model_copy(update={"tree": None}), merged)
