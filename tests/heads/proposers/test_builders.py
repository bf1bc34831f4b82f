"""Drafts come from the distribution that is handed to verification, in chains and in trees of any family.

A chain's stopping rule decides by that distribution alone; each token of a tree is what the draft itself says after the way
to it.
"""

import math

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.decoding import ConfidenceStopping, DecodeConfig, SamplingConfig
from heads.families.registry import FAMILIES
from heads.proposers.builders import ChainBuilder, DynamicTreeBuilder
from heads.proposers.draft_lm import DraftLM
from heads.proposers.protocol import RoundInputs
from heads.sampling.draws import CounterRNG, Role, TextCounts, draw, token_probabilities
from heads.sampling.token_tree import DynamicTreeSpec, Tree
from heads.vocabulary import DraftVocabulary
from tests.support import family_checks as checks

VOCABULARY = DraftVocabulary(token_ids_W=torch.tensor([1, 4, 6]), target_vocab_size=8)
STEPS = [torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 0.5]]), torch.tensor([[1.0, 0.0, 0.2], [0.0, 0.1, 0.3]])]
SAMPLED = SamplingConfig(temperature=0.8, top_p=0.9)
SURE, UNSURE, BROKEN = [0.0, 5.0, 0.0], [0.0, 0.1, 0.2], [0.0, math.nan, 0.0]
CONFIDENCE = ConfidenceStopping(rule="confidence", threshold=0.5)


def drafting(sampling, vocabulary=VOCABULARY, *, keep_logits=False, lengths=(5, 9)):
    rng = CounterRNG(3, range(11, 11 + len(lengths)), torch.device("cpu"))
    inputs = RoundInputs.of([[0] * length for length in lengths], rng, num_drafts=4)
    return ChainBuilder(inputs, sampling, vocabulary, keep_logits=keep_logits)


def stopped(stopping, temperature=0.0, **others):
    sampling = DecodeConfig(num_speculative_tokens=4, stopping=stopping, temperature=temperature)
    return drafting(sampling, None, **others)


def test_greedy_drafts_are_the_likeliest_tokens_and_have_no_distribution():
    greedy = drafting(SamplingConfig())
    assert [greedy.add(logits_BW).tolist() for logits_BW in STEPS] == [[4, 1], [1, 6]]
    proposal = greedy.proposal()
    assert proposal.tokens_BG.tolist() == [[4, 1], [1, 6]]
    assert (proposal.num_drafted.host, proposal.probs_BGV, proposal.logits_BGV) == ([2, 2], None, None)


def test_sampled_drafts_follow_the_distribution_that_is_handed_over_with_the_raw_logits():
    sampled = drafting(SAMPLED, keep_logits=True)
    drafted = torch.stack([sampled.add(logits_BW) for logits_BW in STEPS], 1)
    proposal = sampled.proposal()
    assert torch.equal(proposal.tokens_BG, drafted)
    rng = CounterRNG(3, [11, 12], torch.device("cpu"))
    for step, logits_BW in enumerate(STEPS):
        probs_BW = token_probabilities(logits_BW, SAMPLED)
        torch.testing.assert_close(proposal.probs_BGV[:, step, VOCABULARY.token_ids_W], probs_BW)
        torch.testing.assert_close(proposal.probs_BGV[:, step].sum(-1), torch.ones(2))
        # The draft that is step places ahead of a row of length n stands at position n + step, in the round named n.
        uniform_B1 = rng.uniform(Role.DRAFT, torch.tensor([[5 + step], [9 + step]]), torch.tensor([[5], [9]]))
        assert drafted[:, step].tolist() == VOCABULARY.token_ids_W[draw(probs_BW, uniform_B1.squeeze(1))].tolist()
    torch.testing.assert_close(proposal.logits_BGV[..., VOCABULARY.token_ids_W], torch.stack(STEPS, 1))
    assert torch.isneginf(proposal.logits_BGV).sum() == 2 * 2 * 5


@pytest.mark.parametrize("penalty", [None, 1.5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_head_peeks_at_is_what_it_then_drafts(temperature, penalty):
    sampling = DecodeConfig(temperature=temperature, frequency_penalty=penalty)
    chain, steps = drafting(sampling), torch.stack([STEPS[0]] * 4, 1)
    counts = TextCounts.of(sampling, [[0] * 5, [4] * 9], [2, 8], 8, torch.device("cpu"))
    chain._counts = None if counts is None else counts.among(VOCABULARY.token_ids_W)
    ahead = chain.peek(steps)
    assert torch.equal(ahead, torch.stack([chain.add(logits_BW) for logits_BW in steps.unbind(1)], 1))
    assert temperature or (len(ahead[0].unique()) > 1) == (penalty is not None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_token_of_the_first_unsure_distribution_is_the_last_of_its_row(temperature):
    drafts, free = (stopped(each, temperature, keep_logits=True) for each in (CONFIDENCE, None))
    tokens, finished = [], []
    for logits in ([SURE, SURE], [UNSURE, SURE], [SURE, UNSURE], [SURE, SURE]):
        tokens.append(drafts.add(torch.tensor(logits)))
        assert torch.equal(tokens[-1], free.add(torch.tensor(logits)))  # a rule changes no draw
        finished.append(drafts.finished)
    assert finished == [False, False, True, True]
    proposal = drafts.proposal()
    assert (proposal.num_drafted.host, free.proposal().num_drafted.host) == ([2, 3], [4, 4])
    assert torch.equal(proposal.tokens_BG, torch.stack(tokens[:3], 1))
    assert proposal.logits_BGV.shape == (2, 3, 3)
    assert (proposal.probs_BGV is None) == (temperature == 0)


def test_a_distribution_that_is_no_distribution_goes_on_to_the_decoder():
    drafts = stopped(CONFIDENCE, 1.0, lengths=[5])
    for _ in range(3):
        drafts.add(torch.tensor([BROKEN]))
    assert not drafts.finished
    assert drafts.proposal().num_drafted.host == [3]


def test_a_rule_by_estimates_is_refused_where_the_draft_makes_none():
    with pytest.raises(InputError, match="stopping"):
        stopped(ConfidenceStopping(rule="confidence", threshold=0.4, by="estimate")).add(torch.tensor([SURE, SURE]))


# --- trees ---

TREE = Tree((0, 0, 0, 1, 1, 3, 4, 6, 6))
GROWN = DynamicTreeSpec(num_nodes=7, width=3, depth=3)
SAMPLING = SamplingConfig(temperature=1.2, top_p=0.9)
HEADS = ("medusa", "hydra, prefix", "eagle3", "mtp")


def ways(parents, tokens):
    """Return the drafted tokens that lead to each row, its own last; none for the pending token."""
    found = [[]]
    for parent, token in zip(parents, tokens, strict=True):
        found.append([*found[parent], token])
    return found


def continued(parents, tokens):
    """Yield the number of each row that has children, the way to it, and its children's tokens."""
    for row, way in enumerate(ways(parents, tokens)):
        if below := [tokens[draft] for draft, parent in enumerate(parents) if parent == row]:
            yield row, way, below


class Family:
    """A head at work, and what its training forward says after any way of drafts."""

    def __init__(self, name):
        vocabulary = checks.SOME_TOKENS if name == "eagle3" else None
        self.model = checks.tiny_target("gemma3" if name == "mtp" else "llama")
        self.head = checks.build(checks.SETTINGS[name], self.model, vocabulary)
        self.proposer = FAMILIES[self.head.settings.kind].propose(self.head, self.model.device)
        self.ids_W = torch.arange(64) if vocabulary is None else vocabulary.token_ids_W
        self.rounds = checks.Rounds(self.proposer, self.model)
        self.start = self.rounds.start

    def commit(self, tokens, drafts):
        self.rounds.commit(tokens, drafts, [len(kept) for kept in drafts])

    def logits_after(self, row, way):
        """Return the logits `[W]` of the draft after a way of drafts, from one forward over the whole text."""
        drafts = [*way, 0]
        return checks.trained_logits(self.head, self.model, [row], [drafts])[0, -1]


class Model:
    """A draft LM at work, the same way."""

    def __init__(self, tiny_llama):
        self.model = tiny_llama(seed=2)
        self.proposer = DraftLM(self.model, 64)
        self.ids_W = torch.arange(64)

    def start(self, tokens):
        self.proposer.start(tokens, 64)

    def commit(self, tokens, drafts):
        self.proposer.commit([len(kept) for kept in drafts])

    def logits_after(self, row, way):
        return self.model(input_ids=torch.tensor([[*row, *way]]), use_cache=False).logits[0, -1]


@pytest.fixture(params=["draft_lm", *HEADS])
def draft(request, tiny_llama):
    return Model(tiny_llama) if request.param == "draft_lm" else Family(request.param)


def rounds_of(draft, tree, drawn_by=None):
    """Yield the text and the proposal of two rounds of ragged rows; the second follows a path that is not the first branch."""
    tokens = [[*prompt, 1] for prompt in checks.PROMPTS[:2]]
    draft.start(tokens)
    rng = CounterRNG(0, [7, 8], torch.device("cpu"))
    for kept in ([2, 0], None):
        proposal = draft.proposer.propose_tree(RoundInputs.of(tokens, rng), tree, drawn_by)
        yield tokens, proposal
        if kept is not None:
            parents, ids = proposal.parents_BN.tolist(), proposal.tokens_BG.tolist()
            depth_2 = [way for way in ways(parents[0], ids[0]) if len(way) == 2]
            paths = [depth_2[-1], []]
            draft.commit(tokens, paths)
            tokens = [[*row, *path, 9] for row, path in zip(tokens, paths, strict=True)]


@torch.no_grad()
def test_a_static_tree_holds_the_likeliest_tokens_after_each_way(draft):
    for tokens, proposal in rounds_of(draft, TREE):
        assert proposal.parents_BN.tolist() == [list(TREE.parents)] * 2
        assert proposal.probs_BKV is None
        for text, drafted in zip(tokens, proposal.tokens_BG.tolist(), strict=True):
            for _, way, below in continued(TREE.parents, drafted):
                assert below == draft.ids_W[draft.logits_after(text, way).topk(len(below)).indices].tolist()


@torch.no_grad()
def test_a_drawn_tree_comes_with_the_distributions_that_siblings_were_drawn_from(draft):
    for tokens, proposal in rounds_of(draft, TREE, SAMPLING):
        for number, (text, drafted) in enumerate(zip(tokens, proposal.tokens_BG.tolist(), strict=True)):
            for row, way, below in continued(TREE.parents, drafted):
                expected_V = torch.zeros(64)
                expected_V[draft.ids_W] = token_probabilities(draft.logits_after(text, way), SAMPLING)
                torch.testing.assert_close(proposal.probs_BKV[number, row], expected_V, atol=1e-5, rtol=1e-4)
                support = int((expected_V > 0).sum())
                assert len(set(below[:support])) == min(len(below), support)
                assert (expected_V[below[:support]] > 0).all()


def naive_grown(draft, text, tree):
    """Return the ways of a grown tree, one candidate at a time."""
    frontier, candidates = [([], 0.0)], []
    for _ in range(tree.depth):
        found = []
        for way, score in frontier:
            best = draft.logits_after(text, way).log_softmax(-1).topk(tree.width)
            found += [([*way, int(draft.ids_W[i])], score + float(v)) for v, i in zip(*best, strict=True)]
        candidates += found
        frontier = sorted(found, key=lambda each: -each[1])[: tree.width]
    return sorted(way for way, _ in sorted(candidates, key=lambda each: -each[1])[: tree.num_nodes])


@torch.no_grad()
def test_a_grown_tree_holds_the_most_confident_ways(draft):
    for tokens, proposal in rounds_of(draft, GROWN):
        for text, drafted, parents in zip(tokens, proposal.tokens_BG.tolist(), proposal.parents_BN.tolist(), strict=True):
            assert all(0 <= parent <= draft for draft, parent in enumerate(parents))
            assert sorted(ways(parents, drafted)[1:]) == naive_grown(draft, text, GROWN)


def test_a_grown_tree_keeps_parents_of_what_it_keeps_where_confidences_tie_or_are_no_numbers():
    for logits in (torch.tensor([[[200.0, 0.0, 0.0]]]), torch.full((1, 1, 3), float("nan")), torch.zeros(1, 1, 3)):
        builder = DynamicTreeBuilder(DynamicTreeSpec(num_nodes=4, width=2, depth=4), None)
        while builder.add(logits) is not None:
            pass
        proposal = builder.proposal()
        assert all(0 <= parent <= draft for draft, parent in enumerate(proposal.parents_BN[0].tolist()))
        depths = [len(way) for way in ways(proposal.parents_BN[0].tolist(), proposal.tokens_BG[0].tolist())]
        assert depths == sorted(depths)
