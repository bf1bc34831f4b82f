"""Every node of a tree has the logits of an independent forward over its own path, whatever lies in the cache around it.

With transformers' attention (sdpa, eager) and with the lean forward; grouped queries, and windows shorter than the text.
"""

import copy
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config

from heads.inference.causal_lm import forward_rows, head_logits, new_cache
from heads.inference.lean_forward import make_lean
from heads.sampling.token_tree import tree_attention
from tests.support.family_checks import GROUPED, VOCAB_SIZE

WINDOW = 4
LAYERS = ["sliding_attention", "full_attention"] * 2
OTHERS = GROUPED | {"pad_token_id": None}
CONFIGS = {
    "llama": LlamaConfig(**OTHERS),
    "mistral_sliding": MistralConfig(**OTHERS, sliding_window=WINDOW),
    "qwen2_mixed": Qwen2Config(**OTHERS, use_sliding_window=True, sliding_window=WINDOW, layer_types=LAYERS),
    "gemma3_mixed": Gemma3TextConfig(**OTHERS, head_dim=8, sliding_window=WINDOW, layer_types=LAYERS),
    "learned_positions": GPT2Config(vocab_size=VOCAB_SIZE, n_positions=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=None),
}
# The models are in float64, but eager attention takes its softmax, and transformers its norms, in float32.
TOLERANCE = {"sdpa": 1e-9, "eager": 1e-5, "lean": 1e-5}
LEAN = ["llama", "mistral_sliding", "qwen2_mixed"]
FORWARDS = [(name, way) for name in CONFIGS for way in ("sdpa", "eager", "lean") if way != "lean" or name in LEAN]

bushy = st.integers(1, 10).flatmap(lambda n: st.tuples(*(st.integers(0, draft) for draft in range(n))))
slim = st.integers(6, 10).flatmap(lambda n: st.tuples(*(st.integers(max(0, draft - 2), draft) for draft in range(n))))
parents_of_trees = st.one_of(bushy, slim)  # slim ones are deeper than the window
rows_of_trees = st.lists(parents_of_trees, min_size=1, max_size=3)


@cache
def model_of(name, way):
    torch.manual_seed(3)
    attention = "sdpa" if way == "lean" else way
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float64, attn_implementation=attention).eval()
    for parameter in model.requires_grad_(False).parameters():
        if parameter.ndim == 2:
            parameter.mul_(6.0)
    if way == "lean":
        make_lean(model)
    return model


@cache
def plain_model(name):
    """The same model for forwards over whole texts, which no cache of ours and no forward of ours has a part in."""
    return copy.deepcopy(model_of(name, "sdpa"))


def way_to(parents, row):
    """Return the rows from the first draft down to a row."""
    return [] if row == 0 else [*way_to(parents, parents[row - 1]), row]


def logits_at_the_ends(name, texts):
    """Return the logits `[N, V]` after each of some texts, padded on the right, where causality hides the padding."""
    longest = max(map(len, texts))
    ids_BT = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    logits_BTV = plain_model(name)(input_ids=ids_BT, use_cache=False).logits
    return logits_BTV[torch.arange(len(texts)), torch.tensor([len(text) for text in texts]) - 1]


@pytest.mark.parametrize(("name", "way"), FORWARDS)
@given(trees=st.tuples(rows_of_trees, rows_of_trees), lengths=st.tuples(*[st.integers(1, 9)] * 3), dice=st.randoms())
@settings(max_examples=10, deadline=None)
def test_each_node_has_the_logits_of_its_own_path_in_two_rounds(name, way, trees, lengths, dice):
    model, B = model_of(name, way), min(map(len, trees))
    texts = [[dice.randrange(VOCAB_SIZE) for _ in range(length + 1)] for length in lengths[:B]]
    cache_ = new_cache(model, 48)
    longest = max(map(len, texts))
    with torch.inference_mode():
        # All prompts are read up to the longest one's end, so that what lies behind the shorter ones is of no use.
        ids_BT = torch.tensor([[*text[:-1], *[7] * (longest - len(text))] for text in texts])
        forward_rows(model, cache_, ids_BT, [0] * B)
        for parents in trees:
            texts = check_round(name, TOLERANCE[way], model, cache_, texts, [list(row) for row in parents[:B]], dice)


def check_round(name, tolerance, model, cache_, texts, parents, dice):
    """Read a tree a row, check each node, keep a path of each row at random; return the texts with the path and a token."""
    width, starts = max(map(len, parents)), [len(text) - 1 for text in texts]
    drafts = [[dice.randrange(VOCAB_SIZE) for _ in range(width)] for _ in texts]
    padded = torch.tensor([row + [-1] * (width - len(row)) for row in parents])
    attention = tree_attention(padded, starts)
    ids_BK = torch.tensor([[text[-1], *row] for text, row in zip(texts, drafts, strict=True)])
    hidden_BKD = forward_rows(model, cache_, ids_BK, attention.starts, attention)
    logits_BKV = head_logits(model, hidden_BKD)
    paths = []
    for row, (text, drafted, before) in enumerate(zip(texts, drafts, parents, strict=True)):
        ways = [way_to(before, node) for node in range(len(before) + 1)]
        expected_NV = logits_at_the_ends(name, [[*text, *(drafted[node - 1] for node in way)] for way in ways])
        torch.testing.assert_close(logits_BKV[row, : len(ways)], expected_NV, atol=tolerance, rtol=tolerance)
        paths.append(dice.choice(ways))
    cache_.keep_path(starts, [[0, *path] for path in paths])
    kept = [[drafted[node - 1] for node in path] for drafted, path in zip(drafts, paths, strict=True)]
    return [[*text, *path, dice.randrange(VOCAB_SIZE)] for text, path in zip(texts, kept, strict=True)]
