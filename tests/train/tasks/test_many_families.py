"""Drafts of kept blocks are distilled in any family: gradients reach all of them, and what is saved is a plain causal LM."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from distill.dataset.batches import Example, collate
from heads.artifact import load_draft
from heads.inference.causal_lm import head_logits, read_documents
from tests.support.caches import random_conversations
from tests.support.family_configs import HYBRIDS, STATELESS, VOCAB_SIZE, tiny_model
from tests.support.training_runs import distill_config, draft_task
from train.loop.checkpoints import Progress

BY_NUMBER = {"diffllama"}  # of which only the first blocks can be kept
REFUSED = {"ernie4_5_moe", "jamba", "minicpm3"}  # whose blocks are of a kind by their place


ROWS = random_conversations([(9, 15), (4, 8), (12, 20)], VOCAB_SIZE, seed=1)
BATCH = collate([Example(row.prompt_ids + row.answer_ids, len(row.prompt_ids)) for row in ROWS])


def started(name, as_target, folder, **student):
    layers = [0, 1] if name in BY_NUMBER else [1, 3]
    return draft_task(distill_config(folder, {"layers": layers} | student), as_target(tiny_model(name)), ROWS)


def loss_of(task):
    return task.loss(task.module, BATCH, task.source.read(BATCH)).loss / BATCH.num_labels


def trained(module):
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("name", sorted({*STATELESS, *HYBRIDS} - REFUSED))
def test_a_draft_trains_and_is_loaded_as_a_plain_causal_lm(name, as_target, tmp_path):
    task = started(name, as_target, tmp_path, train_embeddings=True)
    optimizer = torch.optim.AdamW(trained(task.module).values(), lr=1e-3)
    unreached, losses = set(trained(task.module)), []
    for _ in range(3):
        optimizer.zero_grad()
        (loss := loss_of(task)).backward()
        gradients = {each: parameter.grad for each, parameter in trained(task.module).items()}
        assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients.values())
        unreached -= {each for each, gradient in gradients.items() if bool(gradient.any())}
        losses.append(loss.item())
        optimizer.step()
    assert not unreached
    assert losses[0] > losses[1] > losses[2] > 0
    task.save(task.module, Progress(), {})
    draft = task.module.draft.eval()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "artifact", attn_implementation=draft.config._attn_implementation)
    ids_BT = BATCH.input_ids_BT
    expected_BTV = draft(input_ids=ids_BT, use_cache=False).logits
    torch.testing.assert_close(loaded(input_ids=ids_BT, use_cache=False).logits, expected_BTV)


@pytest.mark.parametrize("name", ["phi", "gptj", "gpt2", "falcon"])
def test_a_draft_of_few_tokens_has_the_bias_of_their_rows_whether_tied_or_not(name, as_target, tmp_path):
    model = copy.deepcopy(tiny_model(name))
    if (bias := model.get_output_embeddings().bias) is not None:
        torch.nn.init.normal_(bias)
    target = as_target(model)
    task = draft_task(distill_config(tmp_path, {"layers": [1, 3], "draft_vocab_size": 16}), target, ROWS)
    optimizer = torch.optim.AdamW(trained(task.module).values(), lr=1e-3)
    loss_of(task).backward()
    optimizer.step()
    task.save(task.module, Progress(), {})
    loaded = load_draft(tmp_path / "artifact", target.identity, model).proposer
    whole_BTV = task.module.draft.eval()(input_ids=BATCH.input_ids_BT, use_cache=False).logits
    found_BTW = head_logits(loaded.model, read_documents(loaded.model, BATCH.input_ids_BT, None))
    torch.testing.assert_close(found_BTW, whole_BTV[..., task.vocabulary.token_ids_W])
