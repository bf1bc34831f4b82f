"""After any number of accepted drafts, chain or tree, a cache holds what one forward over the committed tokens puts there.

The caches of the target and of a draft LM, after each round of a decoding. There is one kind, preallocated; layers with a
sliding window keep their whole text in it.
"""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config

from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import DynamicTree, StaticTree
from eval.decoder.batch import BatchRun
from eval.decoder.decode import Request
from heads.inference.causal_lm import forward_rows, new_cache
from heads.inference.lean_forward import make_lean
from heads.proposers.draft_lm import DraftLM
from tests.support.corrected import CorrectedTrees
from tests.support.family_checks import GROUPED

LAYERS = ["sliding_attention", "full_attention"]
OTHERS = GROUPED | {"pad_token_id": None, "num_hidden_layers": 2}
CONFIGS = {
    "llama": LlamaConfig(**OTHERS),
    "mistral_sliding": MistralConfig(**OTHERS, sliding_window=4),
    "qwen2_mixed": Qwen2Config(**OTHERS, use_sliding_window=True, sliding_window=4, layer_types=LAYERS),
    "gemma3_mixed": Gemma3TextConfig(**OTHERS, head_dim=8, sliding_window=4, layer_types=LAYERS),
}
SHAPES = {
    "chain": None,
    "static": StaticTree(kind="static", paths=[[0], [1], [0, 0], [0, 1], [1, 0], [1, 1], [0, 1, 0], [1, 1, 0], [1, 1, 0, 0]]),
    "dynamic": DynamicTree(kind="dynamic", num_nodes=8, width=3),
}
PROMPTS = [(7, 12, 3, 44, 9), (20, 9, 9, 31, 5, 6, 2, 50, 17), (40,)]
NUM_TOKENS = 12
TARGETS = {**{name: (name, False) for name in CONFIGS}, "llama_lean": ("llama", True)}


@cache
def model_of(name, *, lean=False, noise=0.0):
    """Return a random model; with noise, one that says the same most of the time."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float64).eval()
    for parameter in model.requires_grad_(False).parameters():
        if parameter.ndim == 2:
            parameter.mul_(6.0)
            parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    if lean:
        make_lean(model)
    return model


@cache
def texts_of(name):
    """Prompts with their greedy answers, by forwards over whole texts."""
    texts = [list(prompt) for prompt in PROMPTS]
    for text in texts:
        for _ in range(NUM_TOKENS):
            logits_V = model_of(name)(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
            text.append(int(logits_V.argmax()))
    return texts


@cache
def filled(name, model, number):
    """Return a cache that one forward over a whole text has filled; what stands there owes nothing to later tokens."""
    text = texts_of(name)[number]
    fresh = new_cache(model, len(text))
    forward_rows(model, fresh, torch.tensor([text]), [0])
    return fresh


def assert_holds(cache_, row, length, fresh):
    """A row of a cache begins with the keys and values of so many tokens, as one forward makes them."""
    for kept, made in zip(cache_.rows, fresh.rows, strict=True):
        torch.testing.assert_close(kept.keys[row, :, :length], made.keys[0, :, :length])
        torch.testing.assert_close(kept.values[row, :, :length], made.values[0, :, :length])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", TARGETS)
@given(
    order=st.permutations(range(3)),
    pattern=st.one_of(st.none(), st.lists(st.integers(0, 5), min_size=1, max_size=5)),  # None: as the draft's own tokens fall
)
@settings(max_examples=4, deadline=None)
def test_caches_hold_the_committed_tokens_after_each_round(as_target, kind, shape, order, pattern):
    name, lean = TARGETS[kind]
    model, draft = model_of(name, lean=lean), DraftLM(model_of(name, noise=0.1), 64)
    requests = [Request(prompt_id=str(number), category="", tokens=PROMPTS[number]) for number in order]
    config = DecodeConfig(num_speculative_tokens=4, max_new_tokens=NUM_TOKENS, tree=SHAPES[shape])
    proposer = draft if pattern is None else CorrectedTrees(draft, texts_of(name), pattern)
    with torch.inference_mode():
        run = BatchRun(as_target(model), requests, config, proposer)
        run.prefill()
        while run.active:
            for place, row in enumerate(run.active):
                number = int(row.request.prompt_id)
                assert row.tokens == texts_of(name)[number][: len(row.tokens)]
                assert_holds(run.cache, place, len(row.tokens) - 1, filled(name, model, number))
                if pattern is None:  # a draft that is put right has read other tokens than it is told have stayed
                    assert len(row.tokens) - 5 <= draft._cached[place] < len(row.tokens)
                    assert_holds(draft._cache, place, draft._cached[place], filled(name, draft.model, number))
            run.round()
