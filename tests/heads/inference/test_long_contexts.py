"""At 4,096 positions every forward that decodes gives transformers' own logits, in float32.

Each reads nearly all of a text at once, then the rest in pieces, after tokens were taken back, as decoding does.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs.schema.target import TargetConfig
from heads.frozen.hidden_states import TargetStates, read_states
from heads.frozen.loading import load_target
from heads.frozen.placement import ServedForward
from heads.inference.causal_lm import forward_rows, head_logits, new_cache
from heads.inference.lean_forward import make_lean
from heads.inference.runner import runner_of

POSITIONS = 4096
TOLERANCE = 1e-5  # of the largest logit
IDS_BT = torch.randint(64, (2, POSITIONS), generator=torch.Generator().manual_seed(0))
# Tokens a row, and where they begin in each: the second row takes eleven back, a prompt's end and single tokens follow.
PIECES = [(4000, [0, 0]), (11, [4000, 3989]), (64, [4011, 4000]), (20, [4075, 4064]), (1, [4095, 4084])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llama, tiny_tokenizer):
    """A target whose rotary embedding has theta 5e5 and whose attention sees far back."""
    folder = tmp_path_factory.mktemp("long")
    rope = {"rope_theta": 5e5, "rope_type": "default"}
    tiny_llama(
        dtype=torch.float32, spread=4.0, max_position_embeddings=POSITIONS, rope_parameters=rope, head_dim=16
    ).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected_BTV(folder):
    """What transformers gives for the whole text at once."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(input_ids=IDS_BT, use_cache=False).logits


def load(folder, **settings):
    return load_target(TargetConfig(name=str(folder), dtype="float32", device="cpu", **settings)).model


def pieces_of(values_BT):
    """Return what `PIECES` name of values by row and position."""
    return [
        torch.stack([row[start : start + length] for row, start in zip(values_BT, starts, strict=True)])
        for length, starts in PIECES
    ]


@torch.inference_mode()
def decode(model):
    """Return the logits of each of `PIECES`, read one after another into one cache."""
    cache = new_cache(model, POSITIONS)
    read = zip(pieces_of(IDS_BT), PIECES, strict=True)
    return [head_logits(model, forward_rows(model, cache, ids_BT, starts)) for ids_BT, (_, starts) in read]


def largest_error(found, expected_BTV):
    pairs = zip(found, pieces_of(expected_BTV), strict=True)
    return max(float((ours_BTV - theirs_BTV).abs().max()) for ours_BTV, theirs_BTV in pairs) / float(expected_BTV.abs().max())


def serve(model):
    """Let servers run the model, each time over whole texts, as engines do."""

    def states_of(texts, num_last, taps):
        states = [read_states(model, torch.tensor([text]), taps).map(lambda each: each[:, -num_last:]) for text in texts]
        return TargetStates(final_BTE=torch.cat([each.final_BTE for each in states]), taps_ABTE=())

    runner_of(model).forward = ServedForward(model, states_of)


WAYS = {
    "transformers": lambda model: None,
    "lean": make_lean,
    "served": serve,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_decodes_far_into_a_text_as_transformers_reads_it(way, folder, expected_BTV):
    model = load(folder)
    WAYS[way](model)
    assert largest_error(decode(model), expected_BTV) <= TOLERANCE


def test_frequencies_of_16_bits_would_be_found(folder, expected_BTV):
    model = load(folder)
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16()
    assert largest_error(decode(model), expected_BTV) > 100 * TOLERANCE
