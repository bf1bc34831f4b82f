"""At 4,096 positions every way in which an evaluation runs the target gives transformers' logits."""

import pytest
import torch

from configs.schema.target import TargetConfig
from heads.inference.causal_lm import forward_rows, head_logits, new_cache, register_forward
from heads.inference.compiled_forward import make_compiled
from heads.inference.lean_forward import make_lean
from heads.target.hidden_states import TargetStates, read_states
from heads.target.loading import load_target
from heads.target.served.forward import ServedForward

POSITIONS, LAST = 4096, 5


def served(model, whole):
    def states_of(rows, num_last, taps):
        (text_T,) = rows
        final_BTE = read_states(whole, torch.tensor([text_T]), ()).final_BTE[:, -num_last:]
        return TargetStates(final_BTE=final_BTE, taps_ABTE=[])

    register_forward(model, ServedForward(model, states_of))


WAYS = {
    "transformers": lambda model, whole: None,
    "lean": lambda model, whole: make_lean(model),
    "compiled": lambda model, whole: make_compiled(model, backend="eager"),
    "served": served,
    "spread": lambda model, whole: None,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llama, tiny_tokenizer):
    rope = {"rope_type": "default", "rope_theta": 5e5}
    model = tiny_llama(dtype=torch.float32, max_position_embeddings=8192, rope_parameters=rope)
    path = tmp_path_factory.mktemp("long")
    model.save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


@torch.inference_mode()
@pytest.mark.parametrize("way", WAYS)
def test_the_last_logits_of_a_long_text_are_transformers(folder, way, tmp_path):
    spread = {"device_map": {"model.layers": "disk"}, "offload_folder": str(tmp_path)} if way == "spread" else {}
    settings = {"name": str(folder), "dtype": "float32", "device": "cpu"}
    whole = load_target(TargetConfig(**settings)).model
    model = load_target(TargetConfig(**settings, **spread)).model
    ids_1T = torch.arange(POSITIONS).remainder(61).unsqueeze(0)
    expected_1NV = whole(input_ids=ids_1T, use_cache=False).logits[:, -LAST:]
    WAYS[way](model, whole)
    cache = new_cache(model, POSITIONS)
    forward_rows(model, cache, ids_1T[:, :-LAST], [0])
    found_1ND = forward_rows(model, cache, ids_1T[:, -LAST:], [POSITIONS - LAST])
    found_1NV = head_logits(model, found_1ND)
    assert float((found_1NV - expected_1NV).abs().max() / expected_1NV.abs().max()) < 1e-5
