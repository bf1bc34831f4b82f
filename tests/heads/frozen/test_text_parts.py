"""Models that also take images are loaded by their own class, and teach drafts that are plain causal LMs."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from configs.runtime.errors import InputError
from configs.schema.target import TargetConfig
from distill.student.init import keep_layers
from heads.frozen.hidden_states import causal_config
from heads.frozen.loading import load_target
from heads.inference.causal_lm import read_documents
from heads.inference.model_checks import check_keeps_apart
from tests.support import family_checks as checks
from tests.support.architectures import tiny_model

# name (`tests/support/architectures.py`): the class of a draft made of its blocks
TABLE = {
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen3_vl_moe": "Qwen3MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "aya_vision": "Cohere2ForCausalLM",
}
IDS_1T = torch.arange(3, 14).unsqueeze(0)


@pytest.fixture(scope="module", params=TABLE)
def case(request, tmp_path_factory, tiny_tokenizer):
    """A target loaded from the folder of a random model."""
    model = tiny_model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    target = load_target(TargetConfig(name=str(folder), dtype="float32", device="cpu"))
    return SimpleNamespace(target=target, draft_class=TABLE[request.param], model=model)


def test_a_draft_of_its_blocks_is_a_plain_causal_lm(case, tmp_path):
    target = case.target.model
    draft = keep_layers(target, [0, 2])
    assert type(draft).__name__ == case.draft_class
    draft.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=target.config._attn_implementation)
    torch.testing.assert_close(loaded.eval()(input_ids=IDS_1T).logits, draft(input_ids=IDS_1T).logits)
    whole = keep_layers(target, [0, 1, 2, 3])
    torch.testing.assert_close(read_documents(whole, IDS_1T, None), read_documents(target, IDS_1T, None), rtol=1e-4, atol=1e-4)


def test_a_head_learns_from_it_and_conversations_in_a_row_stay_apart(case):
    if case.draft_class != "Llama4ForCausalLM":  # whose chunks packing refuses
        check_keeps_apart(case.target.model)
    target = dataclasses.replace(case.target, eos_token_ids=())
    head = checks.build(checks.SETTINGS["eagle3"], target.model)
    checks.assert_gradients_reach_everything(head, target)
    checks.assert_greedy_output_is_plain(head, target)


def test_a_template_that_knows_lists_of_parts_only_is_given_them(case):
    parts = "{% for each in messages %}{% for part in each['content'] %}{{ part['text'] }} {% endfor %}{% endfor %}w9"
    tokenizer = copy.deepcopy(case.target.tokenizer)
    tokenizer.chat_template = parts
    target = dataclasses.replace(case.target, tokenizer=tokenizer)
    conversation = [{"role": "user", "content": "w5 w6"}]
    expected = "w5 w6 w9" if target.model.config.get_text_config() is not target.model.config else "w9"
    assert target.encode_chat(conversation)[-3:] == tokenizer(expected, add_special_tokens=False)["input_ids"][-3:]


def test_text_parts_without_a_causal_lm_of_their_own_are_named():
    with pytest.raises(InputError, match="mllama_text_model"):
        causal_config(transformers.MllamaConfig().get_text_config())


def test_a_checkpoint_without_some_weights_is_refused(case, tmp_path, tiny_tokenizer):
    weights = case.model.state_dict()
    case.model.save_pretrained(
        tmp_path, state_dict={name: weights[name] for name in weights if "layers.2.self_attn" not in name}
    )
    tiny_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"layers\.2\.self_attn"):
        load_target(TargetConfig(name=str(tmp_path), dtype="float32", device="cpu"))
