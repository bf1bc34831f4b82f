"""Whatever the tree and the family, each drafted token is what the draft itself would say after the way to it."""

import pytest
import torch

from configs.schema.decoding import SamplingConfig
from heads.families.registry import FAMILIES
from heads.frozen.hidden_states import forward_states
from heads.inference.causal_lm import new_cache
from heads.proposers.draft_lm import DraftLM
from heads.proposers.protocol import RoundInputs
from heads.proposers.tree_builder import DynamicTreeBuilder
from heads.sampling.counter_rng import CounterRNG
from heads.sampling.probabilities import token_probabilities
from heads.sampling.token_tree import DynamicTreeSpec, Tree
from tests.support import family_checks as checks

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
        self.cache = new_cache(self.model, 64)

    def start(self, tokens):
        prompts = [row[:-1] for row in tokens]
        longest = max(map(len, prompts))
        ids_BT = torch.tensor([row + [0] * (longest - len(row)) for row in prompts])
        self.proposer.start(tokens, 64, forward_states(self.model, self.cache, ids_BT, [0] * len(tokens), self.proposer.taps))

    def commit(self, tokens, drafts):
        """Tell it that rows keep these drafts, as a decoder does for a path of a tree."""
        width = max(map(len, drafts))
        ids_BT = torch.tensor([[row[-1], *kept, *[0] * (width - len(kept))] for row, kept in zip(tokens, drafts, strict=True)])
        starts = [len(row) - 1 for row in tokens]
        states = forward_states(self.model, self.cache, ids_BT, starts, self.proposer.taps)
        self.proposer.commit([len(kept) for kept in drafts], states)

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
