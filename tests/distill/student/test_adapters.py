"""Adapters change nothing until trained, are all that is trained, and merge into the very weights they stood for."""

import pytest
import torch
from torch import nn

from configs.schema.training import LoraSettings, StudentConfig
from distill.student.init import add_adapters, initial_draft, merge_adapters

IDS = torch.tensor([[7, 12, 3, 40]])


@pytest.fixture
def draft(tiny_llama):
    return tiny_llama(seed=2)


def test_new_adapters_change_nothing_and_are_all_that_is_trained(draft):
    before = draft(input_ids=IDS).logits
    add_adapters(draft, LoraSettings(rank=4))
    torch.testing.assert_close(draft(input_ids=IDS).logits, before)
    trained = {name for name, parameter in draft.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 2 * 7  # A and B of seven linear layers in each of two blocks
    assert all("lora_" in name for name in trained)


def test_merged_weights_compute_what_the_adapted_model_did_and_are_saved_as_a_plain_model(draft, tmp_path):
    names = list(draft.state_dict())
    before = draft(input_ids=IDS).logits
    add_adapters(draft, LoraSettings(rank=4, alpha=16, dropout=0.5))
    torch.manual_seed(0)
    for name, parameter in draft.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    adapted = draft.eval()(input_ids=IDS).logits
    merge_adapters(draft)
    torch.testing.assert_close(draft(input_ids=IDS).logits, adapted, rtol=0, atol=1e-9)
    assert (adapted - before).abs().max() > 0.1
    assert list(draft.state_dict()) == names
    assert all(type(module) is nn.Linear for name, module in draft.named_modules() if name.endswith("_proj"))
    draft.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}


def test_embeddings_are_trained_beside_adapters_only_where_asked(tiny_llama, as_target):
    target = as_target(tiny_llama(seed=1, layers=3))
    frozen = initial_draft(StudentConfig(layers=[0, 2], lora=LoraSettings()), target)
    trained = initial_draft(StudentConfig(layers=[0, 2], lora=LoraSettings(), train_embeddings=True), target)
    assert [draft.lm_head.weight.requires_grad for draft in (frozen, trained)] == [False, True]
    assert not trained.model.layers[0].mlp.up_proj.base_layer.weight.requires_grad
