"""Whatever is drafted, however much of it is right, and whoever shares the batch: the output is what it has to be.

Drafts come from scripts. The target is in float32; its prompts come from a pool, so that how clear its choices are is known.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import StaticTree
from eval.decoder.decode import Request, decode
from tests.support.scripted_drafts import ScriptedDrafts

VOCAB_SIZE, NUM_TOKENS, CONTEXT = 64, 16, 18
# Of 6 to 9 tokens; no two begin alike.
PROMPTS = [tuple((9 * n + 5 * place * place + 3) % VOCAB_SIZE for place in range(6 + n % 4)) for n in range(16)]

batches = st.lists(st.sampled_from(range(len(PROMPTS))), min_size=1, max_size=4, unique=True)
gammas = st.integers(1, 7)
trees = st.integers(1, 9).flatmap(lambda n: st.tuples(*(st.integers(0, draft) for draft in range(n))).map(sorted))


@dataclass
class Known:
    """A target, and what it writes after each prompt of the pool."""

    model: torch.nn.Module
    texts: list


@pytest.fixture(scope="module")
def known(tiny_llama):
    model = tiny_llama(seed=1, dtype=torch.float32)
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


def check_ranks(round_, tree):
    assert len(round_.ranks or ()) == round_.num_accepted
    assert round_.num_accepted == 0 or list(round_.ranks) in tree.paths
    assert len(round_.drafted) <= tree.depth


def check_counts(generation):
    """Rounds hold the tokens after the first; each is its accepted drafts and the target's own token, unless cut."""
    committed = [token for round_ in generation.rounds for token in round_.committed]
    assert list(generation.tokens[1:]) == committed
    for place, round_ in enumerate(generation.rounds):
        last = place == len(generation.rounds) - 1
        assert round_.committed[: round_.num_accepted] == round_.drafted[: round_.num_accepted]
        cut = last and generation.stop_reason == "eos" and len(round_.committed) == round_.num_accepted
        assert cut or len(round_.committed) == round_.num_accepted + 1


@given(
    batch=batches,
    gamma=gammas,
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
    plain, _ = decode(target, requests_for(batch), DecodeConfig(num_speculative_tokens=0, max_new_tokens=max_new_tokens))
    for number, generation, alike in zip(batch, generations, plain, strict=True):
        answer, reason = expected_answer(known, number, eos, max_new_tokens, target.max_positions)
        assert (list(generation.tokens), generation.stop_reason) == (answer, reason)
        assert (alike.tokens, alike.stop_reason) == (generation.tokens, reason)
        check_counts(generation)
        for round_ in generation.rounds if tree else ():
            check_ranks(round_, tree)
    assert timing.num_tokens == sum(len(generation.tokens) - 1 for generation in generations)
    assert timing.num_rounds == sum(len(generation.rounds) for generation in generations)
