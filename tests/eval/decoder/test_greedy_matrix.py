"""Every shape and proposer: greedy output is plain greedy output in float32, and sampled output owes nothing to the batch.

Greedy drafts are made right to a depth that changes from round to round, so that everything that counts accepted drafts is at
work whatever an untrained head says.
"""

import copy
import itertools
from functools import cache

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import ConfidenceStopping, DynamicTree, StaticTree
from eval.decoder.decode import Request, decode
from heads.families.registry import FAMILIES
from heads.proposers.draft_lm import DraftLM
from heads.proposers.lookup import PromptLookup, SuffixLookup
from heads.proposers.merged import LookupFirst, MergedDrafts
from heads.proposers.protocol import TreeProposer
from heads.proposers.self_speculation import early_exit
from tests.support import family_checks as checks
from tests.support.corrected import Corrected, CorrectedTrees
from tests.support.decoding import HEADS, assert_same_alone, head_proposer

PROMPTS = [[7, 12, 3, 44, 9], [20, 9, 9, 31, 5, 6, 2, 50, 17], [40]]
NUM_TOKENS = 12
DEPTHS = (0, 4, 1, 3, 2)
SHAPES = {
    "chain": None,
    "stopped chain": None,
    "static": StaticTree(kind="static", paths=[[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0], [2, 0, 0], [2, 0, 0, 0]]),
    "dynamic": DynamicTree(kind="dynamic", num_nodes=9, width=3),
}
STOPPING = ConfidenceStopping(rule="confidence", threshold=0.05)
OTHERS = {
    "draft_lm": lambda model: DraftLM(early_exit(model, 2), 64),
    "prompt_lookup": lambda model: PromptLookup(model.device),
    "suffix_lookup": lambda model: SuffixLookup(model.device),
    "lookup_first": lambda model: LookupFirst(PromptLookup(model.device), DraftLM(early_exit(model, 2), 64), 64),
    "merged": lambda model: MergedDrafts([PromptLookup(model.device), DraftLM(early_exit(model, 2), 64)], model.device),
}
BLOCKS = {"dflash", "dspark", "dflash2", "xpress", "domino"}
CHAINS_ONLY = sorted({"mtp_by_depth", "peagle", "prompt_lookup", "suffix_lookup", "lookup_first", "early_exit"} | BLOCKS)
TREES_ONLY = {"merged"}
CASES = [
    (name, shape)
    for name in (*HEADS, *OTHERS)
    for shape, tree in SHAPES.items()
    if name not in (CHAINS_ONLY if tree else TREES_ONLY)
]


@cache
def model_of(dtype):
    return copy.deepcopy(checks.tiny_target("llama")).to(dtype)


@cache
def answers():
    """Greedy answers by forwards over whole texts, whose closest choice is clear enough for float32."""
    model, texts, margins = model_of(torch.float32), [list(prompt) for prompt in PROMPTS], []
    with torch.no_grad():
        for text in texts:
            for _ in range(NUM_TOKENS):
                best = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].topk(2)
                text.append(int(best.indices[0]))
                margins.append(float(best.values[0] - best.values[1]))
    assert min(margins) > 1e-3  # in logits
    return texts


def proposer_of(name):
    model = model_of(torch.float32)
    if name in OTHERS:
        return OTHERS[name](model)
    head = checks.build(HEADS[name], checks.tiny_target("llama")).float()
    head._target = (model,)
    return FAMILIES[HEADS[name].kind].propose(head, model.device)


def decode_all(target, config, proposer):
    """Decode two prompts together and the third by itself."""
    requests = [Request(prompt_id=str(n), category="", tokens=tuple(prompt)) for n, prompt in enumerate(PROMPTS)]
    return [each for batch in (requests[:2], requests[2:]) for each in decode(target, batch, config, proposer)[0]]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_greedy_output_is_plain_greedy_output(as_target, name, shape):
    texts, target, inner = answers(), as_target(model_of(torch.float32)), proposer_of(name)
    proposer = (CorrectedTrees if isinstance(inner, TreeProposer) else Corrected)(inner, texts, DEPTHS)
    stopping = STOPPING if shape == "stopped chain" else None
    config = DecodeConfig(num_speculative_tokens=4, max_new_tokens=NUM_TOKENS, tree=SHAPES[shape], stopping=stopping)
    generations = decode_all(target, config, proposer)
    assert [[*each.prompt_tokens, *each.tokens] for each in generations] == texts
    accepted = {round_.num_accepted for each in generations for round_ in each.rounds}
    assert name.endswith("lookup") or stopping or len(accepted) > 2  # or little was put to the test


@pytest.mark.parametrize("name", CHAINS_ONLY)
def test_a_tree_is_refused_where_a_proposer_drafts_chains_only(as_target, name):
    config = DecodeConfig(num_speculative_tokens=4, max_new_tokens=NUM_TOKENS, tree=SHAPES["static"])
    with pytest.raises(InputError, match=r"tree: \w+ drafts chains only"):
        decode_all(as_target(model_of(torch.float32)), config, proposer_of(name))


@pytest.fixture(scope="module")
def short_target(as_target):
    """A context of 24 tokens, in which the rows below have room for 6, 15, 22 and 1 more."""
    model = copy.deepcopy(checks.tiny_target("llama"))
    model.config.max_position_embeddings = 24
    return as_target(model)


LENGTHS = [[(7 * n + 3) % 64 for n in range(18)], PROMPTS[1], [40, 11], [(5 * n + 1) % 64 for n in range(23)]]
SAMPLED = DecodeConfig(num_speculative_tokens=4, max_new_tokens=30, temperature=1.0)


@pytest.mark.parametrize(("name", "rule"), list(zip(HEADS, itertools.cycle(["token", "block", "match"]))))
def test_a_chain_of_a_head_owes_nothing_to_the_batch(short_target, name, rule):
    """Every head with one of the rules, which know nothing of heads; rows end sooner or later."""
    config = SAMPLED.model_copy(update={"verification": rule})
    assert_same_alone(short_target, config, head_proposer(name, short_target.model), LENGTHS)


@pytest.mark.parametrize("name", ["medusa", "hydra", "eagle3", "mtp"])
def test_a_grown_tree_owes_nothing_to_the_batch(short_target, name):
    tree = DynamicTree(kind="dynamic", num_nodes=6, width=4)
    config = SAMPLED.model_copy(update={"tree": tree, "temperature": 0.0})
    assert_same_alone(short_target, config, head_proposer(name, short_target.model), LENGTHS)
