"""The tapped states are the residual stream that transformers knows, at the place that an artifact's convention names."""

import pytest
import torch

from configs.runtime.errors import InputError
from heads.frozen import hidden_states
from heads.frozen.hidden_states import blocks, check_taps, final_norm, final_norm_scale, read_states, tapped
from heads.frozen.placement import own_copy
from heads.inference.causal_lm import head_logits
from tests.support import family_checks as checks

TARGETS = pytest.mark.parametrize("name", sorted(checks.CONFIGS))
ALL_TAPS = range(5)
IDS_BT = torch.tensor([[7, 12, 3, 44, 9, 1, 2, 3], [20, 9, 9, 31, 5, 6, 2, 50]])


@TARGETS
def test_taps_are_the_hidden_states_of_transformers(name):
    model = checks.tiny_target(name)
    states = read_states(model, IDS_BT, ALL_TAPS)
    with torch.no_grad():
        theirs = model(input_ids=IDS_BT, output_hidden_states=True, use_cache=False)
    # Theirs are the inputs of each block, and the last one is after the final norm: h_4 they do not show.
    for tap in range(4):
        torch.testing.assert_close(states.taps_ABTE[tap], theirs.hidden_states[tap], rtol=0, atol=0)
    torch.testing.assert_close(states.final_BTE, theirs.hidden_states[4], rtol=0, atol=0)
    torch.testing.assert_close(final_norm(model)(states.taps_ABTE[4]), states.final_BTE)
    torch.testing.assert_close(head_logits(model, states.final_BTE), theirs.logits)


@TARGETS
def test_the_documents_of_a_long_packed_row_are_read_one_by_one(name, monkeypatch):
    model, positions_BT = checks.tiny_target(name), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 0]])
    whole, lengths, read = read_states(model, IDS_BT, [1, 3], positions_BT), [], hidden_states.read_documents
    monkeypatch.setattr(hidden_states, "LONG_ROW", 8)
    monkeypatch.setattr(
        hidden_states, "read_documents", lambda model, ids, *more: lengths.append(ids.shape[1]) or read(model, ids, *more)
    )
    apart = read_states(model, IDS_BT, [1, 3], positions_BT)
    torch.testing.assert_close((apart.final_BTE, *apart.taps_ABTE), (whole.final_BTE, *whole.taps_ABTE))
    assert lengths == [3, 5, 6, 1, 1]
    assert torch.equal(read_states(model, IDS_BT, []).final_BTE, read(model, IDS_BT, None))


def hooks(model):
    """Return how many hooks each block has; transformers has its own."""
    return [len(block._forward_hooks) + len(block._forward_pre_hooks) for block in blocks(model)]


def test_only_tapped_states_are_kept_and_only_while_asked(tiny_llama):
    model = tiny_llama(layers=4)
    before = hooks(model)
    with tapped(model, [1, 3]):
        assert hooks(model) == [before[0] + 1, before[1], before[2] + 1, before[3]]  # which stay, and are set once
    with torch.no_grad(), tapped(model, [1, 3]) as seen:
        model(input_ids=IDS_BT)
        assert sorted(seen) == [1, 3]
        first = seen[3]
        model(input_ids=IDS_BT[:, :2])
        assert seen[3].shape[1] == 2  # the latest forward's alone
    with torch.no_grad():
        model(input_ids=IDS_BT[:, :4])
    assert seen[3].shape[1] == 2
    assert first.shape[1] == IDS_BT.shape[1]
    assert hooks(model) == [before[0] + 1, before[1], before[2] + 1, before[3]]
    assert not own_copy(blocks(model)[0])._forward_hooks  # a copy collects nothing for the target


def test_states_that_do_not_lead_to_the_logits_are_refused(tiny_llama):
    model, inside = tiny_llama(), []
    check_taps(model, [1])
    # A family that adds something between its last block and its norm, which looking at the blocks does not show.
    model.model.register_forward_pre_hook(lambda *_: inside.append(True))
    model.model.register_forward_hook(lambda *_: inside.clear())
    model.model.norm.register_forward_pre_hook(lambda _, args: (args[0] + 1,) if inside else None)
    with pytest.raises(InputError, match="tapped states of LlamaForCausalLM"):
        check_taps(model, [1])
    check_taps(model, [])


@TARGETS
def test_the_scale_of_the_final_norm_is_what_its_family_means_by_its_weight(name):
    model = checks.tiny_target(name)
    weight_E = final_norm(model).weight
    expected_E = weight_E + 1 if name == "gemma3" else weight_E
    torch.testing.assert_close(final_norm_scale(model), expected_E.detach(), atol=1e-4, rtol=1e-4)
