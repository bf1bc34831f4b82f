"""Decoding tiny models of many families gives the tokens of transformers' `generate`, or is refused by name.

Windows, chunks and the length of short rotary factors are 16 tokens, shorter than the texts; `docs/models.md` has the table.
"""

import copy
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from eval.decoder.decode import generate
from heads.frozen.loading import Target
from heads.inference.causal_lm import forward_rows, new_cache, read_documents
from heads.inference.model_checks import check_split
from heads.inference.runner import first_of_equals
from heads.proposers.draft_lm import DraftLM
from tests.support.architectures import tiny_config
from tests.support.family_configs import tiny_model

# By name of the models check, what is refused: by way of decoding, or in all ways.
NO_TREES = {"tree": "drafts of a tree.* tree null"}
NO_BATCHES = {"batch": "rows of unequal lengths.* batch_size 1"}
REFUSED = {
    "falcon, alibi": dict.fromkeys(("chain", "batch", "tree"), "ALiBi counts positions by the columns of the cache"),
    "gpt_neo": NO_TREES | NO_BATCHES,
    "inkling_text": NO_TREES | NO_BATCHES,
    "minimax": dict.fromkeys(("chain", "batch", "tree"), "carries the past in states.* not run on a cache"),
    "minimax_m3_vl_text": NO_TREES,
    "mpt": NO_TREES,
}
# Variants of families: the family, and what its config has besides.
CHANGED = {
    "deepseek_v32, ties": ("deepseek_v32", {"index_n_heads": 1}),
    "nemotron_h, bounded": ("nemotron_h", {"time_step_min": 0.5}),  # in transformers' uncached forward only
}
# One family a mechanism; the models check has them all.
ATTENTION = (
    *("codegen", "deepseek_v3", "deepseek_v32", "doge", "dots3_note_text", "gemma3n_text"),
    *("gemma4_text, shared", "gpt2", "gpt_oss", "llama4_text", "longcat_flash", "mistral", "opt"),
    *("phi3, longrope", "phimoe, longrope", "qwen2, sliding", "qwen3", "zaya"),
)
WITH_STATES = ("falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "mamba", "mamba2", "nemotron_h", "qwen3_next")
WITH_IMAGES = ("qwen2_5_vl", "qwen3_vl_moe", "gemma3", "aya_vision")  # on text alone
FAMILIES = sorted([*ATTENTION, *WITH_STATES, *WITH_IMAGES, *REFUSED, *CHANGED])
PROMPTS = [list(range(3, 14)), list(range(40, 47)), list(range(90, 96))]
NEW = 20
WAYS = {
    "chain": (PROMPTS[:1], {}),
    "batch": (PROMPTS, {"batch_size": 3}),
    "tree": (PROMPTS[:1], {"tree": {"kind": "static", "branching": [2, 2, 1]}}),
}


def changed(model, seed, change):
    """Apply `change` to every matrix of a model, and leave it frozen."""
    torch.manual_seed(seed)
    for parameter in model.eval().requires_grad_(False).parameters():
        if parameter.ndim >= 2:
            change(parameter)
    return model


@cache
def built(name):
    """Return a random model of this family, in which few logits are near ties."""
    if name not in CHANGED:
        return tiny_model(name)
    family, changes = CHANGED[name]
    config = tiny_config(family)
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return changed(model, 0, lambda matrix: matrix.mul_(3.0))


def target_of(name):
    return Target(model=built(name), tokenizer=None, identity=None, eos_token_ids=())


def decoded(name, way):
    """Decode with a draft that is a copy with some noise, and so is often right."""
    draft = changed(copy.deepcopy(built(name)), 1, lambda matrix: matrix.add_(0.05 * matrix.std() * torch.randn_like(matrix)))
    prompts, settings = WAYS[way]
    return generate(target_of(name), prompts, DecodeConfig(max_new_tokens=NEW, **settings), DraftLM(draft, 256))


@cache
def plain(name, number):
    """Return what transformers' `generate` answers to a prompt, up to the longest text that the target can have."""
    ids_1T = torch.tensor([PROMPTS[number]])
    with first_of_equals(built(name).config):
        text_1T = built(name).generate(ids_1T, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return text_1T[0, ids_1T.shape[1] : target_of(name).max_positions].tolist()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_decodes_as_transformers_does_or_is_refused(name, way):
    check_split(built(name))
    if (reason := REFUSED.get(name, {}).get(way)) is None:
        assert decoded(name, way) == [plain(name, number) for number in range(len(WAYS[way][0]))]
        return
    with pytest.raises(InputError, match=reason):
        decoded(name, way)


def test_of_keys_of_equal_scores_the_first_are_seen():
    scores_BT = torch.tensor([[0.0, 2.0, 0.0, -1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 3.0, 1.0, 1.0]])
    with first_of_equals(built("deepseek_v32, ties").config):
        chosen = [scores_BT.topk(3).indices.tolist(), torch.topk(scores_BT, 3, dim=-1).indices.tolist()]
    naive = [sorted(range(6), key=lambda column: (-row[column], column))[:3] for row in scores_BT.tolist()]
    assert chosen == [naive, naive]
    with first_of_equals(built("qwen3").config):
        assert not torch.overrides._get_current_function_mode_stack()


def test_a_text_beyond_the_short_rotary_factors_is_refused_with_the_remedy():
    model = built("phi3, longrope")
    with pytest.raises(InputError, match=r"more than 16 tokens, and this one has 17; .*short_factor to the values of long"):
        forward_rows(model, new_cache(model, 20), torch.arange(17).unsqueeze(0), [0])


@torch.no_grad()
def test_padding_of_a_row_may_stand_beyond_the_context_of_a_model_with_learned_positions():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=12, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    texts = [list(range(1, 13)), list(range(30, 42))]
    cache = new_cache(model, 16)
    forward_rows(model, cache, torch.tensor([text[:11] for text in texts]), [0, 0])
    hidden = forward_rows(model, cache, torch.tensor([[texts[0][11], 0, 0, 0], texts[1][5:9]]), [11, 5])
    torch.testing.assert_close(hidden[0, 0], read_documents(model, torch.tensor(texts[:1]), None)[0, 11])
    torch.testing.assert_close(hidden[1], read_documents(model, torch.tensor([texts[1][:9]]), None)[0, 5:])
