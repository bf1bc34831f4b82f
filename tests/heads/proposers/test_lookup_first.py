"""A lookup before a draft: the plain answer whoever drafts, and a draft that has read what the lookup drafted for it."""

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from eval.decoder.decode import decode, generate
from heads.proposers.draft_lm import DraftLM
from heads.proposers.merged import MAX_BEHIND, LookupFirst
from heads.proposers.prompt_lookup import PromptLookup
from tests.support import family_checks as checks
from tests.support.decoding import HEADS, assert_same_alone, head_proposer, requests_for

GREEDY = DecodeConfig(num_speculative_tokens=3, max_new_tokens=24, batch_size=3)
PROMPTS = [[7, 12, 3, 7, 12], [20, 9, 9, 31, 5, 6, 20, 9], [40, 11, 12, 3]]


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
        self.rounds = [self.rounds[row] for row in rows]


@pytest.fixture(scope="module")
def target(as_target):
    return as_target(checks.tiny_target("llama"))


@pytest.fixture(scope="module")
def texts(target):
    answers = generate(target, PROMPTS, GREEDY.model_copy(update={"num_speculative_tokens": 0, "max_new_tokens": 40}))
    return [[*prompt, *answer] for prompt, answer in zip(PROMPTS, answers, strict=True)]


def drafts_of(name, target, tiny_llama):
    return DraftLM(tiny_llama(seed=2), 64) if name == "model" else head_proposer(name, target.model)


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
    draft, drafted = watched(drafts_of(name, target, tiny_llama))
    fresh, expected = watched(drafts_of(name, target, tiny_llama))
    both = LookupFirst(Sometimes(texts, target.device, every=3, wrong=wrong, by_turns=by_turns), draft)
    generations, _ = decode(target, requests_for(PROMPTS), GREEDY, both)
    assert [each.tokens for each in generations] == [
        tuple(text[len(p) : len(p) + 24]) for text, p in zip(texts, PROMPTS, strict=True)
    ]
    assert {round_.by_lookup for each in generations for round_ in each.rounds} == {False, True}
    assert len(drafted) > 3
    for text, logits in drafted:
        expected.clear()
        decode(target, requests_for([text[:-1]]), GREEDY.model_copy(update={"max_new_tokens": 5}), fresh)
        (again, others), *_ = expected
        assert again == text
        torch.testing.assert_close(logits[: len(others)], others[: len(logits)])


def watched(draft):
    """Return a draft, and a list that takes each row's text and logits whenever it proposes."""
    seen, propose = [], draft.propose

    def proposing(tokens, *others, keep_logits):
        proposal = propose(tokens, *others, keep_logits=True)
        rows = zip(tokens, proposal.logits_BGV, proposal.num_drafted, strict=True)
        seen.extend((list(row), logits_GV[:count].clone()) for row, logits_GV, count in rows if count)
        return proposal

    draft.propose = proposing
    return draft, seen


@pytest.mark.parametrize("settings", [{}, {"verification": "token"}, {"verification": "match"}])
def test_a_row_gets_the_same_tokens_in_any_batch_also_where_rows_differ_in_their_source(target, tiny_llama, settings):
    config = GREEDY.model_copy(update={"temperature": 1.0, **settings})
    both = LookupFirst(PromptLookup(target.device, shortest=1), DraftLM(tiny_llama(seed=2), 64))
    together = assert_same_alone(target, config, both, PROMPTS)
    assert {round_.by_lookup for each in together for round_ in each.rounds} == {False, True}


def test_the_draft_is_not_run_in_rounds_of_the_lookup_and_keeps_up_with_a_long_copy(target, tiny_llama):
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=100, batch_size=2)
    prompts = [[7, 12, 3], [20, 9]]
    answers = generate(target, prompts, config.model_copy(update={"num_speculative_tokens": 0, "max_new_tokens": 120}))
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    draft, runs = head_proposer("eagle3", target.model), []
    propose = draft.propose

    def watched(tokens, *others, **settings):
        runs.append([len(row) for row in tokens])
        return propose(tokens, *others, **settings)

    draft.propose = watched
    both = LookupFirst(Sometimes(texts, target.device, every=10**9), draft)
    generations, _ = decode(target, requests_for(prompts), config, both)
    assert [list(each.tokens) for each in generations] == [answer[:100] for answer in answers]
    assert len(runs) == 1
    assert runs[0][0] >= MAX_BEHIND
    assert all(round_.by_lookup for each in generations for round_ in each.rounds if round_.drafted)


def test_overlap_is_measured_where_the_draft_drafted_and_nowhere_else(target, texts, tiny_llama):
    both = LookupFirst(Sometimes(texts, target.device), DraftLM(tiny_llama(seed=2), 64))
    generations, _ = decode(target, requests_for(PROMPTS), GREEDY, both, measure_overlap=True)
    rounds = [round_ for each in generations for round_ in each.rounds if round_.drafted]
    assert all((round_.overlap is None) == round_.by_lookup for round_ in rounds)


@pytest.mark.parametrize(
    ("text", "shortest", "drafted"),
    [
        ([1, 2, 3, 4, 9, 1, 2], 2, [3, 4, 9]),
        ([1, 2, 3, 4, 9, 1, 2], 3, []),  # no match is as long
        ([8, 5, 6, 5, 6, 5], 1, [6, 5, 6]),  # the match runs into the end of the text, which repeats itself
    ],
)
def test_prompt_lookup_copies_from_a_match_that_is_long_enough_and_goes_on_with_what_repeats(text, shortest, drafted):
    lookup = PromptLookup(torch.device("cpu"), longest=4, shortest=shortest)
    lookup.start([text], 20, None)
    proposal = lookup.propose([text], 3, GREEDY, None, keep_logits=False)
    assert proposal.tokens_BG[0].tolist() == drafted
    assert proposal.num_drafted == [len(drafted)]


def test_the_estimates_of_a_draft_are_told_in_the_rounds_that_it_drafts_itself(target, texts):
    lookup, draft = Sometimes(texts, target.device, wrong=True), head_proposer("dspark", target.model)
    generations, _ = decode(target, requests_for(PROMPTS), GREEDY, LookupFirst(lookup, draft), measure_overlap=True)
    rounds = [round_ for generation in generations for round_ in generation.rounds if round_.drafted]
    assert {round_.by_lookup for round_ in rounds} == {True, False}
    for round_ in rounds:
        told = None if round_.distributions is None else len(round_.distributions.estimate)
        assert told == (None if round_.by_lookup else len(round_.overlap))
