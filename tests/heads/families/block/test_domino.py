"""Domino's correction is the formula written out, with torch's own GRU; the first draft has none."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.family_checks import PROMPTS, SETTINGS, SOME_TOKENS, build, inputs_of, tiny_target

DOMINO = SETTINGS["domino"]


@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize("vocabulary", [None, SOME_TOKENS], ids=["whole", "reduced"])
@torch.no_grad()
def test_a_draft_is_corrected_by_the_texts_tokens_from_the_pending_one_on(vocabulary, from_anchor):
    model = tiny_target("gemma3")  # caps the head's logits, not the correction
    head = build(DOMINO.model_copy(update={"sample_from_anchor": from_anchor}), model, vocabulary)
    plain = build(SETTINGS["dflash"].model_copy(update={"sample_from_anchor": from_anchor}), model, vocabulary)
    plain.load_state_dict({name: value for name, value in head.state_dict().items() if name in plain.state_dict()})
    batch, states = inputs_of(model, PROMPTS, head.taps)
    T, checked = batch.input_ids_BT.shape[1], 0
    for number, (depth, without) in enumerate(zip(head(batch, states), plain(batch, states), strict=True)):
        logits_NW, base_NW = depth.logits_of(depth.hidden_ND), without.logits_of(without.hidden_ND)
        for row, origin in enumerate(depth.origins_N.tolist()):
            prompt, anchor = PROMPTS[origin // T], origin % T + 1
            expected_W = base_NW[row]
            if number > 0:
                state_R = gru_state(head, model, prompt[anchor : anchor + number + 1])
                inner, _, outer = head.embed_proj
                joined = torch.cat([without.hidden_ND[row], state_R])
                expected_W = expected_W + outer.weight @ functional.silu(inner.weight @ joined)
            torch.testing.assert_close(logits_NW[row], expected_W, atol=1e-5, rtol=1e-5)
            checked += 1
    assert checked > 20


def gru_state(head, model, tokens):
    """Return the state that torch's GRU has after these tokens."""
    gru = nn.GRU(32, DOMINO.gru_hidden_dim, bias=False, dtype=model.dtype)
    gru.load_state_dict(head.prefix_gru.state_dict())
    embedded = model.get_input_embeddings()(torch.tensor(tokens))
    return gru(embedded.unsqueeze(1))[1][0, 0]
