"""Decoding with trees gives what plain decoding gives, whatever the tree, the draft and the batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, MistralConfig

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import DynamicTree, StaticTree
from configs.schema.heads import Eagle3Settings, HydraSettings, MedusaSettings, MtpSettings
from eval.decoder.decode import decode, generate
from heads.families.registry import FAMILIES
from heads.proposers.draft_lm import DraftLM
from heads.proposers.prompt_lookup import PromptLookup
from heads.proposers.protocol import Proposal
from tests.support import family_checks as checks
from tests.support.decoding import PROMPTS, assert_same_alone, requests_for

TREES = {
    "bushy": StaticTree(kind="static", branching=[3, 2, 1]),
    "uneven": StaticTree(kind="static", paths=[[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0], [0, 1, 0, 0]]),
    "grown": DynamicTree(kind="dynamic", num_nodes=9, width=3),
}
HEADS = {
    "medusa": MedusaSettings(kind="medusa", num_depths=3, num_layers=1),
    "hydra": HydraSettings(kind="hydra", num_depths=3),
    "eagle3": Eagle3Settings(kind="eagle3", num_depths=3, taps=[1, 2, 3]),
    "mtp": MtpSettings(kind="mtp", num_depths=3, shared_depths=True),
}


class ScriptedTrees:
    """Proposes trees in which the true continuation may hang anywhere, at the places and depths it is told."""

    taps, num_trees = (), 1

    def __init__(self, answers, spots):
        self.answers, self.spots = answers, spots

    def start(self, tokens, capacity, states):
        self.begin = [len(row) - 1 for row in tokens]
        self.alive = list(range(len(tokens)))
        self.told = []

    def propose_tree(self, tokens, tree, drawn_by, rng):
        drafts = []
        for row, number in zip(tokens, self.alive, strict=True):
            true = self.answers[number][len(row) - self.begin[number] :]
            num_right, right_rank = self.spots[len(row) % len(self.spots)]
            row_, way = [], {0: 0}  # rows that lie on the true way, by their depth
            for draft, parent in enumerate(tree.parents):
                depth = way.get(parent)
                rank = tree.parents[:draft].count(parent)
                width = tree.parents.count(parent)
                on_way = depth is not None and depth < min(num_right, len(true)) and rank == min(right_rank, width - 1)
                wrong = (true[depth] if depth is not None and depth < len(true) else 0) + 1 + rank
                row_.append(true[depth] if on_way else wrong % 64)
                if on_way:
                    way[draft + 1] = depth + 1
            drafts.append(row_)
        tokens_BN = torch.tensor(drafts)
        parents_BN = torch.tensor(tree.parents).expand_as(tokens_BN)
        return Proposal(tokens_BG=tokens_BN, num_drafted=[tree.num_nodes] * len(drafts), parents_BN=parents_BN)

    def propose(self, *args, **kwargs):
        raise AssertionError("a chain was asked for")

    def commit(self, num_accepted, states):
        assert states.final_BTE.shape[1] == 1 + max(num_accepted)
        self.told.append(list(num_accepted))

    def keep_rows(self, rows):
        self.alive = [self.alive[row] for row in rows]


def with_tree(name, **others):
    return DecodeConfig(**({"num_speculative_tokens": 4, "max_new_tokens": 20, "tree": TREES[name]} | others))


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1))


@pytest.fixture(scope="module")
def answers(target):
    return generate(target, PROMPTS, DecodeConfig(num_speculative_tokens=0, max_new_tokens=20, batch_size=4))


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("head", HEADS)
def test_greedy_output_with_a_head_is_plain_greedy_output(as_target, head, tree):
    target = as_target(checks.tiny_target("gemma3"))
    module = checks.build(HEADS[head], target.model)
    proposer = FAMILIES[head].propose(module, target.device)
    plain = DecodeConfig(num_speculative_tokens=0, max_new_tokens=12, batch_size=3)
    config = with_tree(tree, max_new_tokens=12, batch_size=3)
    assert generate(target, checks.PROMPTS, config, proposer) == generate(target, checks.PROMPTS, plain)


@given(
    parents=st.integers(1, 9).flatmap(lambda n: st.tuples(*(st.integers(0, draft) for draft in range(n))).map(sorted)),
    spots=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=4),
    batch=st.lists(st.sampled_from(range(4)), min_size=1, max_size=4, unique=True),
    max_new_tokens=st.integers(1, 20),
)
@settings(max_examples=25, deadline=None)
def test_any_tree_with_the_truth_anywhere_in_it_gives_the_plain_answer(target, answers, parents, spots, batch, max_new_tokens):
    rows = {(): 0}
    for draft, parent in enumerate(parents):
        way = next(way for way, row in rows.items() if row == parent)
        rows[(*way, parents[:draft].count(parent))] = draft + 1
    paths = [list(path) for path in rows if path]
    tree = StaticTree(kind="static", paths=paths)
    config = DecodeConfig(num_speculative_tokens=tree.depth, max_new_tokens=max_new_tokens, tree=tree)
    expected = [answers[number] for number in batch]
    draft = ScriptedTrees(expected, spots)
    generations, _ = decode(target, requests_for([PROMPTS[number] for number in batch]), config, draft)
    assert [list(generation.tokens) for generation in generations] == [answer[:max_new_tokens] for answer in expected]
    known = {tuple(path) for path in paths}
    for generation in generations:
        for round_ in generation.rounds:
            assert round_.drafted[: round_.num_accepted] == round_.committed[: round_.num_accepted]
            assert len(round_.ranks or ()) == round_.num_accepted
            assert round_.num_accepted == 0 or round_.ranks in known
            assert len(round_.drafted) <= tree.depth


def test_a_perfect_draft_is_accepted_down_to_the_leaves_and_recorded_by_its_ranks(target):
    config = with_tree("bushy", num_speculative_tokens=3, max_new_tokens=17)
    generations, timing = decode(target, requests_for(PROMPTS), config, DraftLM(target.model, 64))
    for generation in generations:
        seen = [(round_.num_accepted, round_.ranks, round_.num_nodes) for round_ in generation.rounds]
        assert seen == [(3, (0, 0, 0), 15)] * 4
    assert timing.num_rounds == 4 * 4


@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0, "verification": "match"}])
def test_a_tree_that_is_a_chain_is_the_chain(target, tiny_llama, sampled):
    chain = StaticTree(kind="static", branching=[1, 1, 1])
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=20, **sampled)
    one, _ = decode(target, requests_for(PROMPTS), config, DraftLM(tiny_llama(seed=2), 64))
    other, _ = decode(target, requests_for(PROMPTS), config.model_copy(update={"tree": chain}), DraftLM(tiny_llama(seed=2), 64))
    assert [each.tokens for each in one] == [each.tokens for each in other]
    for rounds, others in ((each.rounds, another.rounds) for each, another in zip(one, other, strict=True)):
        assert [(each.drafted, each.num_accepted) for each in rounds] == [(e.drafted, e.num_accepted) for e in others]


@pytest.mark.parametrize("tree", TREES)
def test_matched_trees_draw_the_very_tokens_of_plain_sampling(target, tiny_llama, tree):
    config = with_tree(tree, temperature=1.0, verification="match")
    plain, _ = decode(target, requests_for(PROMPTS), config)
    matched, _ = decode(target, requests_for(PROMPTS), config, DraftLM(tiny_llama(seed=2), 64))
    assert [generation.tokens for generation in matched] == [generation.tokens for generation in plain]


@pytest.mark.parametrize("head", ["medusa", "eagle3"])
def test_a_request_gets_the_same_drawn_tree_and_tokens_in_any_batch(as_target, head):
    target = as_target(checks.tiny_target("llama"))
    proposer = FAMILIES[head].propose(checks.build(HEADS[head], target.model), target.device)
    config = with_tree("uneven", temperature=1.0, top_p=0.95, max_new_tokens=10)
    assert_same_alone(target, config, proposer, checks.PROMPTS)


@pytest.mark.parametrize("where", range(1, 5))
def test_end_of_text_anywhere_on_a_path_ends_the_answer_there(tiny_llama, as_target, answers, where):
    end = answers[0][where]
    if end in answers[0][:where]:
        pytest.skip("the token occurs earlier")
    target = as_target(tiny_llama(seed=1), eos=(end,))
    draft = ScriptedTrees(answers[:1], [(4, 1)])
    (generation,), _ = decode(target, requests_for(PROMPTS[:1]), with_tree("uneven"), draft)
    assert list(generation.tokens) == answers[0][: where + 1]
    assert generation.stop_reason == "eos"


def test_a_sliding_window_reaches_back_by_positions_and_not_by_slots(as_target, tiny_llama):
    torch.manual_seed(1)
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        sliding_window=4,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.ndim == 2 else 1.0)
    target = as_target(model)
    plain = generate(target, PROMPTS, DecodeConfig(num_speculative_tokens=0, max_new_tokens=16, batch_size=4))
    for draft in (DraftLM(model, 64), DraftLM(tiny_llama(seed=2), 64)):
        assert generate(target, PROMPTS, with_tree("uneven", max_new_tokens=16, batch_size=4), draft) == plain


def test_answers_may_fill_the_context_to_the_last_place(as_target, tiny_llama):
    target = as_target(tiny_llama(seed=1, max_position_embeddings=16))
    plain = generate(target, PROMPTS, DecodeConfig(num_speculative_tokens=0, max_new_tokens=20, batch_size=4))
    assert [len(prompt) + len(answer) for prompt, answer in zip(PROMPTS, plain, strict=True)] == [16] * 4
    draft = DraftLM(tiny_llama(seed=1, max_position_embeddings=16), 64)
    assert generate(target, PROMPTS, with_tree("bushy", batch_size=4), draft) == plain


def test_a_request_whose_logits_are_not_finite_fails_alone(tiny_llama, as_target):
    model = tiny_llama(seed=1)
    with torch.no_grad():
        model.get_input_embeddings().weight[40] = float("nan")
    target, healthy = as_target(model), [[7, 12, 3], [20, 9]]
    config = with_tree("grown", max_new_tokens=8)
    alone, _ = decode(target, requests_for(healthy), config, DraftLM(tiny_llama(seed=2), 64))
    mixed, _ = decode(target, requests_for([*healthy, [40]]), config, DraftLM(tiny_llama(seed=2), 64))
    assert mixed[2].stop_reason == "non_finite"
    assert [generation.tokens for generation in mixed[:2]] == [generation.tokens for generation in alone]


def test_a_draft_that_only_drafts_chains_is_refused(target):
    with pytest.raises(InputError, match="PromptLookup drafts chains only"):
        generate(target, PROMPTS, with_tree("bushy"), PromptLookup(target.device))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_speculative_tokens": 2}, "3 tokens deep, and num_speculative_tokens allows 2"),
        ({"temperature": 1.0, "verification": "block"}, "chains only"),
        ({"temperature": 1.0, "verification": "token", "tree": TREES["grown"]}, "set verification to match"),
        ({"stopping": {"rule": "confidence"}}, "stopping cuts chains only"),
    ],
)
def test_settings_that_do_not_go_with_a_tree_are_refused(change, reason):
    with pytest.raises(ValidationError, match=reason):
        with_tree("bushy", **change)
    assert DecodeConfig(num_speculative_tokens=0, tree=TREES["bushy"]).tree is not None
