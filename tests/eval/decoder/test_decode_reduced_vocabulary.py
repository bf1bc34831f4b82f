"""A draft that can say only some tokens changes no output: neither the greedy one nor the distribution of the sampled one."""

import pytest
import torch

from configs.schema.decoding import DecodeConfig
from eval.decoder.decode import decode, generate
from heads.proposers.draft_lm import DraftLM
from heads.sampling.probabilities import token_probabilities
from heads.vocabulary import DraftVocabulary, keep_head_rows
from tests.support.decoding import PROMPTS, requests_for, samples_against


def reduced(model, ids):
    """A draft of this model's making that can say these tokens only."""
    vocabulary = DraftVocabulary(token_ids_W=torch.tensor(ids), target_vocab_size=model.config.vocab_size)
    keep_head_rows(model, vocabulary)
    return DraftLM(model, vocabulary.target_vocab_size, vocabulary)


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1))


@pytest.mark.parametrize("seed", [1, 2])
def test_greedy_output_is_plain_greedy_output(target, tiny_llama, seed):
    plain = generate(target, PROMPTS, DecodeConfig(num_speculative_tokens=0, max_new_tokens=24, batch_size=4))
    spoken = sorted({token for answer in plain for token in answer})[::2]
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=24, batch_size=4)
    assert generate(target, PROMPTS, config, reduced(tiny_llama(seed=seed), spoken)) == plain


def test_overlap_counts_the_mass_on_unknown_tokens_as_rejected(target, tiny_llama):
    config = DecodeConfig(num_speculative_tokens=1, max_new_tokens=3, temperature=0.9, top_k=40)
    draft, prompt = reduced(tiny_llama(seed=1), list(range(32))), [7, 12, 3]
    (generation,), _ = decode(target, requests_for([prompt]), config, draft, measure_overlap=True)
    (measured, *_) = generation.rounds[0].overlap
    ids = torch.tensor([[*prompt, generation.tokens[0]]])
    logits = target.model(input_ids=ids, use_cache=False).logits[0, -1].detach()
    p = token_probabilities(logits, config)
    assert measured == pytest.approx(float(p[:32].sum()), abs=1e-6)  # a copy of the target overlaps with all it can say


@pytest.mark.parametrize("verification", ["token", "block"])
def test_sampled_pairs_of_tokens_follow_the_targets_distribution(tiny_llama, as_target, verification, exact_distribution):
    model = tiny_llama(seed=4, vocab_size=5, dtype=torch.float32, spread=3.0)
    draft = reduced(tiny_llama(seed=5, vocab_size=5, dtype=torch.float32, spread=3.0), [1, 2, 4])
    config = DecodeConfig(num_speculative_tokens=2, max_new_tokens=3, temperature=1.2, verification=verification)
    generations, _ = decode(as_target(model), requests_for([(1, 2)] * 4000), config, draft)
    drafted = {token for generation in generations for round_ in generation.rounds for token in round_.drafted}
    assert drafted == {1, 2, 4}
    assert samples_against(exact_distribution(model, (1, 2), 3, config), generations).p_value > 1e-4
