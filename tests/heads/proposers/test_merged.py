"""A lookup before a draft, and drafts merged into trees: the plain answer whoever drafts, and nothing lost for the others."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig, StaticTree
from eval.decoder.decode import decode, generate
from heads.proposers.draft_lm import DraftLM
from heads.proposers.merged import MAX_BEHIND, LookupFirst, MergedDrafts, merge
from tests.support import family_checks as checks
from tests.support.decoding import HEADS, head_proposer, requests_for

GREEDY = DecodeConfig(num_speculative_tokens=3, max_new_tokens=24, batch_size=3)
PROMPTS = [[7, 12, 3, 7, 12], [20, 9, 9, 31, 5, 6, 20, 9], [40, 11, 12, 3]]
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
    answers = generate(target, PROMPTS, GREEDY.model_copy(update={"num_speculative_tokens": 0, "max_new_tokens": 120}))
    return [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers, strict=True)]


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
        *((name, True, True) for name in ("model", *HEADS)),
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
    generations, _ = decode(target, requests_for(PROMPTS), GREEDY, both)
    assert [[*prompt, *each.tokens] for prompt, each in zip(PROMPTS, generations, strict=True)] == [
        text[: len(prompt) + 24] for prompt, text in zip(PROMPTS, texts, strict=True)
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
    generations, _ = decode(target, requests_for(PROMPTS[:2]), config, both)
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
    generations, _ = decode(target, requests_for(PROMPTS), config, both)
    assert all(round_.num_accepted == 3 for generation in generations for round_ in generation.rounds)
    assert any(round_.ranks[0] == 1 for generation in generations for round_ in generation.rounds)


def test_merging_at_a_temperature_is_matched_and_never_drawn(target, tiny_llama):
    merged = MergedDrafts([DraftLM(tiny_llama(seed=2), 64), head_proposer("eagle3", target.model)], target.device)
    config = GREEDY.model_copy(update={"tree": CHAINS, "temperature": 1.0})
    plain = generate(target, PROMPTS, config.model_copy(update={"num_speculative_tokens": 0}))
    assert generate(target, PROMPTS, config.model_copy(update={"verification": "match"}), merged) == plain
    with pytest.raises(InputError, match="set verification to match"):
        generate(target, PROMPTS, config, merged)
    with pytest.raises(InputError, match="set tree"):
        generate(target, PROMPTS, config.model_copy(update={"tree": None}), merged)
