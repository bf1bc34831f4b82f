"""transformers as the other side: a fixed number of drafts, nothing of a model's own settings, the same ends as ours."""

import pytest
from transformers import GenerationConfig

from configs.schema.decoding import DecodeConfig
from eval.decoder.decode import Request, decode
from scripts.lab.bench.peers.transformers_generate import TransformersPeer

REQUEST = Request(prompt_id="p", category="c", tokens=(7, 12, 3, 40))


def test_every_round_verifies_the_same_number_of_drafts(tiny_llama, as_target):
    # Rejected drafts are what transformers' default schedule and threshold would answer with shorter rounds.
    target = as_target(tiny_llama(seed=1))
    lengths = []
    target.model.requires_grad_(False)
    target.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    peer = TransformersPeer(target, tiny_llama(seed=2), num_speculative_tokens=3, max_new_tokens=24)
    assert len(peer.generate(REQUEST, assisted=True).tokens) == 24
    first, *rounds, last = lengths
    assert first == len(REQUEST.tokens) + 3  # the prompt and the first drafts together
    assert set(rounds[:-2]) == {4}
    assert last <= 4  # the last rounds are cut to what the answer still has room for
    assert all(parameter.requires_grad for parameter in target.model.parameters())  # transformers is slow with frozen ones
    assert target.model.generation_config.assistant_ensemble_weight is None  # lossy


@pytest.mark.parametrize("assisted", [False, True])
def test_settings_that_come_with_a_model_change_nothing(tiny_llama, as_target, assisted):
    model, draft = tiny_llama(seed=1), tiny_llama(seed=2)
    own = {"do_sample": True, "temperature": 3.0, "repetition_penalty": 5.0}
    model.generation_config, draft.generation_config = GenerationConfig(**own), GenerationConfig(**own)
    target = as_target(model)
    (ours,), _ = decode(target, [REQUEST], DecodeConfig(max_new_tokens=20))
    peer = TransformersPeer(target, draft, num_speculative_tokens=3, max_new_tokens=20)
    assert peer.generate(REQUEST, assisted=assisted).tokens == ours.tokens


@pytest.mark.parametrize("assisted", [False, True])
def test_an_answer_ends_with_the_end_of_text_as_ours_does(tiny_llama, as_target, assisted):
    model = tiny_llama(seed=1)
    (endless,), _ = decode(as_target(model), [REQUEST], DecodeConfig(max_new_tokens=12))
    target = as_target(model, eos=(endless.tokens[5], 63))
    (ours,), _ = decode(target, [REQUEST], DecodeConfig(max_new_tokens=12))
    theirs = TransformersPeer(target, tiny_llama(seed=1), 3, 12).generate(REQUEST, assisted=assisted)
    assert theirs.tokens == ours.tokens
    assert theirs.tokens[-1] == endless.tokens[5]
    assert theirs.stop_reason == ours.stop_reason == "eos"
