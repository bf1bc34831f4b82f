"""Whatever is drafted, however much of it is right, and whoever shares the batch: the output is what it has to be.

Every proposer, shape and rule, on a target in float32 whose prompts come from a pool: how clear its choices are is known.
Greedy drafts are made right to a depth that changes from round to round, or come from scripts: everything that counts accepted
drafts is at work whatever an untrained head says. Tokens are held to `eval.decoder.plain`, lossless by enumeration.
"""

import copy
import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.runtime.errors import InputError
from configs.schema.decoding import ConfidenceStopping, DecodeConfig, DynamicTree, StaticTree
from eval.decoder import plain
from eval.decoder.decode import Request, decode, generate
from eval.decoder.rules import ChainVerification
from heads.families.early_exit import part_of
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import LookupFirst, MergedDrafts, PromptLookup, SuffixLookup
from heads.sampling.draws import request_number
from tests.support import family_checks as checks
from tests.support.corrected import corrected
from tests.support.decoding import HEADS, assert_same_alone, head_proposer
from tests.support.decoding import PROMPTS as SHORT
from tests.support.enumeration import enumerate_rule, random_toy
from tests.support.scripted_drafts import ScriptedDrafts

VOCAB_SIZE, NUM_TOKENS, CONTEXT = 64, 16, 18
# Of 6 to 9 tokens; no two begin alike.
PROMPTS = [tuple((9 * n + 5 * place * place + 3) % VOCAB_SIZE for place in range(6 + n % 4)) for n in range(16)]
DEPTHS = (0, 4, 1, 3, 2)
SHAPES = {
    "chain": None,
    "stopped chain": None,
    "static": StaticTree(kind="static", paths=[[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0], [2, 0, 0], [2, 0, 0, 0]]),
    "dynamic": DynamicTree(kind="dynamic", num_nodes=9, width=3),
}
STOPPING = ConfidenceStopping(rule="confidence", threshold=0.05)
OTHERS = {
    "draft_lm": lambda model: DraftLM(part_of(model, 0, 2), 64),
    "prompt_lookup": lambda model: PromptLookup(model.device),
    "suffix_lookup": lambda model: SuffixLookup(model.device),
    "lookup_first": lambda model: LookupFirst(PromptLookup(model.device), DraftLM(part_of(model, 0, 2), 64), 64, num_drafts=2),
    "merged": lambda model: MergedDrafts(
        [
            PromptLookup(model.device),
            DraftLM(part_of(model, 0, 2), 64),
            *(head_proposer(each, model) for each in ("eagle3", "peagle")),
        ],
        model.device,
    ),
}
BLOCKS = {"dflash", "dspark", "dflash2", "xpress", "domino"}
CHAINS_ONLY = sorted({"peagle", "prompt_lookup", "suffix_lookup", "lookup_first", "early_exit"} | BLOCKS)
TREES_ONLY = {"merged"}
CASES = [
    (name, shape)
    for name in (*HEADS, *OTHERS)
    for shape, tree in SHAPES.items()
    if name not in (CHAINS_ONLY if tree else TREES_ONLY)
]


@dataclass
class Known:
    """A target, and what it writes after each prompt of the pool."""

    model: torch.nn.Module
    texts: list


@pytest.fixture(scope="module")
def known():
    model = copy.deepcopy(checks.tiny_target("llama")).float()
    texts, margins = [list(prompt) for prompt in PROMPTS], []
    with torch.no_grad():  # forwards over whole texts, a length at a time: no cache, no padding
        for length in range(6, 10):
            own = [text for text in texts if len(text) == length]
            for _ in range(NUM_TOKENS + 8):
                best = model(input_ids=torch.tensor(own), use_cache=False).logits[:, -1].topk(2)
                margins.append(float((best.values[:, 0] - best.values[:, 1]).min()))
                for text, token in zip(own, best.indices[:, 0].tolist(), strict=True):
                    text.append(token)
    assert min(margins) > 1e-4  # in logits: clear enough for float32
    return Known(model, texts)


@pytest.fixture(scope="module")
def short_model(known):
    """The same model with room for a few tokens only."""
    model = copy.deepcopy(known.model)
    model.config.max_position_embeddings = CONTEXT
    return model


def requests_for(numbers):
    return [Request(prompt_id=f"p{number}", category="", tokens=PROMPTS[number]) for number in numbers]


def proposer_of(name, model):
    return OTHERS[name](model) if name in OTHERS else head_proposer(name, model)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_greedy_output_is_plain_greedy_output(as_target, known, name, shape):
    proposer, is_shared = proposer_of(name, known.model), name == "early_exit"  # which has read the drafts that it made
    proposer = proposer if is_shared else corrected(proposer, known.texts, DEPTHS)
    stopping = STOPPING if shape == "stopped chain" else None
    config = DecodeConfig(num_speculative_tokens=4, max_new_tokens=NUM_TOKENS, tree=SHAPES[shape], stopping=stopping)
    batches = (decode(as_target(known.model), requests_for(batch), config, proposer)[0] for batch in ((0, 1), (2,)))
    generations = list(itertools.chain(*batches))
    for generation, text in zip(generations, known.texts, strict=False):
        assert [*generation.prompt_tokens, *generation.tokens] == text[: len(generation.prompt_tokens) + NUM_TOKENS]
    accepted = {round_.num_accepted for each in generations for round_ in each.rounds}
    assert name.endswith("lookup") or stopping or is_shared or len(accepted) > 2  # or little was put to the test


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["draft_lm", "medusa", "eagle3", "xpress", "early_exit", "lookup_first"])
def test_penalised_output_is_plain_output_greedy_and_with_one_hot_drafts(as_target, known, name, temperature):
    target, prompts = as_target(known.model), PROMPTS[:3]
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.5}
    config = DecodeConfig(num_speculative_tokens=4, max_new_tokens=12, temperature=temperature, batch_size=3, **penalties)
    alone = generate(target, prompts, config.model_copy(update={"num_speculative_tokens": 0, "batch_size": 1}))
    assert generate(target, prompts, config, proposer_of(name, known.model)) == alone


@pytest.mark.parametrize("name", CHAINS_ONLY)
def test_a_tree_is_refused_where_a_proposer_drafts_chains_only(as_target, known, name):
    config = DecodeConfig(num_speculative_tokens=4, tree=SHAPES["static"])
    with pytest.raises(InputError, match="tree"):
        decode(as_target(known.model), requests_for([0]), config, proposer_of(name, known.model))


# --- in any batch -------------------------------------------------------------------------------------------------

LENGTHS = [
    [(7 * n + 3) % 64 for n in range(18)],
    [20, 9, 9, 31, 5, 6, 2, 50, 17],
    [40, 11],
    [(5 * n + 1) % 64 for n in range(23)],
]
# Every head with one of the rules, which know nothing of heads; the other ways of ending and choosing drafts.
ALONE = [
    *((name, {"verification": rule}) for name, rule in zip(HEADS, itertools.cycle(["token", "block", "one_hot"]))),
    *((name, {"temperature": 0.0, "tree": SHAPES["dynamic"]}) for name in ("medusa", "hydra", "eagle3", "mtp")),
    *(("lookup_first", {"verification": rule}) for rule in ("token", "block", "one_hot")),
    ("draft_lm", {"stopping": ConfidenceStopping(rule="confidence", threshold=0.3), "verification": "block"}),
]


@pytest.mark.parametrize(("name", "way"), ALONE)
def test_a_request_gets_the_same_tokens_in_any_batch(as_target, name, way):
    """In a context of 24 tokens, in which the rows have room for 6, 15, 22 and 1 more: they end sooner or later."""
    model = copy.deepcopy(checks.tiny_target("llama"))
    model.config.max_position_embeddings = 24
    config = DecodeConfig.model_validate({"num_speculative_tokens": 4, "max_new_tokens": 30, "temperature": 1.0} | way)
    assert_same_alone(as_target(model), config, proposer_of(name, model), LENGTHS)


# --- by scripts ---------------------------------------------------------------------------------------------------

batches = st.lists(st.sampled_from(range(len(PROMPTS))), min_size=1, max_size=4, unique=True)
trees = st.integers(1, 9).flatmap(lambda n: st.tuples(*(st.integers(0, draft) for draft in range(n))).map(sorted))


def expected_answer(known, number, eos, max_new_tokens, context):
    """Return the plain answer and why it ends, from the text alone."""
    prompt = PROMPTS[number]
    answer = known.texts[number][len(prompt) :]
    for place, token in enumerate(answer, start=1):
        if token in eos:
            return answer[:place], "eos"
        if place == max_new_tokens:
            return answer[:place], "length"
        if len(prompt) + place == context:
            return answer[:place], "context"
    raise AssertionError("the pool's texts are too short for this")


def tree_of(parents):
    """Return the tree with these parents, breadth first."""
    paths = [[]]
    for draft, parent in enumerate(parents):
        paths.append([*paths[parent], parents[:draft].count(parent)])
    return StaticTree(kind="static", paths=paths[1:])


def check_counts(generation, tree):
    """Rounds hold the tokens after the first; each is its accepted drafts and the target's own token, unless cut."""
    committed = [token for round_ in generation.rounds for token in round_.committed]
    assert list(generation.tokens[1:]) == committed
    for place, round_ in enumerate(generation.rounds):
        last = place == len(generation.rounds) - 1
        assert round_.committed[: round_.num_accepted] == round_.drafted[: round_.num_accepted]
        cut = last and generation.stop_reason == "eos" and len(round_.committed) == round_.num_accepted
        assert cut or len(round_.committed) == round_.num_accepted + 1
        if tree is not None:
            assert len(round_.ranks or ()) == round_.num_accepted
            assert round_.num_accepted == 0 or list(round_.ranks) in tree.paths
            assert len(round_.drafted) <= tree.depth


@given(
    batch=batches,
    gamma=st.integers(1, 7),
    max_new_tokens=st.integers(1, NUM_TOKENS),
    eos=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=6),
    short=st.booleans(),
    parents=st.none() | trees,
)
@settings(max_examples=60, deadline=None)
def test_output_is_plain_and_counts_agree(as_target, known, short_model, batch, gamma, max_new_tokens, eos, short, parents):
    target = as_target(short_model if short else known.model, eos=eos)
    tree = None if parents is None else tree_of(parents)
    num_tokens = max(gamma, tree.depth) if tree else gamma
    config = DecodeConfig(num_speculative_tokens=num_tokens, max_new_tokens=max_new_tokens, tree=tree)
    generations, timing = decode(target, requests_for(batch), config, ScriptedDrafts(known.texts, VOCAB_SIZE))
    alike, _ = decode(target, requests_for(batch), DecodeConfig(num_speculative_tokens=0, max_new_tokens=max_new_tokens))
    for number, generation, other in zip(batch, generations, alike, strict=True):
        answer, reason = expected_answer(known, number, eos, max_new_tokens, target.max_positions)
        assert (list(generation.tokens), generation.stop_reason) == (answer, reason)
        assert (other.tokens, other.stop_reason) == (generation.tokens, reason)
        check_counts(generation, tree)
    assert timing.num_tokens == sum(len(generation.tokens) - 1 for generation in generations)
    assert timing.num_rounds == sum(len(generation.rounds) for generation in generations)


# --- the algorithm on one page ------------------------------------------------------------------------------------


def logits_of(model):
    return lambda tokens: model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("num_drafts", [0, 1, 4])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20}], ids=str)
@torch.no_grad()
def test_a_batch_gets_the_tokens_of_each_text_decoded_plainly(target, tiny_llama, as_target, sampling, num_drafts):
    other = tiny_llama(seed=1, spread=5.5)
    config = DecodeConfig(num_speculative_tokens=num_drafts, max_new_tokens=14, verification="token", batch_size=4, **sampling)
    alone = generate(target, SHORT, config.model_copy(update={"num_speculative_tokens": 0}))
    ends = (alone[0][5], alone[1][9])
    expected = [
        plain.decode(logits_of(target.model), logits_of(other), prompt, config, request=request_number(str(number)), eos=ends)
        for number, prompt in enumerate(SHORT)
    ]
    assert generate(as_target(target.model, eos=ends), SHORT, config, DraftLM(other, 64)) == expected
    assert {len(answer) for answer in expected} > {14}


def test_it_is_lossless_and_no_longer_where_too_many_drafts_stay():
    def rule(p_BKV, q_BGV, tokens_BG, num_drafted_B, accept_BG, residual_B, bonus_B):
        rows = zip(p_BKV, q_BGV, tokens_BG.tolist(), accept_BG, residual_B, bonus_B, strict=True)
        found = [plain.verify(*row, residual=residual, bonus=bonus) for *row, residual, bonus in rows]
        return ChainVerification(*torch.tensor(found).unbind(1))

    def lenient(p, q, tokens, num_drafted, accept, *others):
        return rule(p, q, tokens, num_drafted, accept * 0.9, *others)

    assert enumerate_rule(rule, random_toy(0, num_drafts=2)).total_variation < 1e-12
    assert enumerate_rule(lenient, random_toy(0, num_drafts=2)).total_variation > 1e-3
