"""The decoder gives what plain decoding gives, counts what it committed, and stops where it must."""

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from eval.decoder.decode import decode, generate
from eval.decoder.records import SPECULATIVE
from heads.proposers.draft_lm import DraftLM
from heads.proposers.prompt_lookup import PromptLookup
from heads.proposers.protocol import Proposal
from heads.target.hidden_states import forward_states
from tests.support.decoding import PROMPTS, assert_same_alone, requests_for


class Scripted:
    """Proposes the continuation it was given, right or wrong, as far as it goes."""

    def __init__(self, script):
        self.script = script

    taps = ()

    def start(self, tokens, capacity, states):
        self.begin = [len(row) - 1 for row in tokens]
        self.alive = list(range(len(tokens)))

    def propose(self, tokens, num_tokens, sampling, rng, *, keep_logits):
        drafts = []
        for row, number in zip(tokens, self.alive, strict=True):
            done = len(row) - self.begin[number]
            drafts.append(list(self.script[number][done : done + num_tokens]))
        padded = torch.tensor([draft + [0] * (num_tokens - len(draft)) for draft in drafts])
        return Proposal(tokens_BG=padded, num_drafted=[len(draft) for draft in drafts])

    def commit(self, num_accepted, states):
        self.last = list(num_accepted)

    def keep_rows(self, rows):
        self.alive = [self.alive[row] for row in rows]


def oracle(model, prompt, num_tokens, eos=()):
    """Greedy decoding with no cache and no batch."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in eos:
            break
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1))


@pytest.fixture(scope="module")
def answers(target):
    return [oracle(target.model, prompt, 24) for prompt in PROMPTS]


@pytest.fixture
def proposers(tiny_llama, target, answers):
    """Proposers from useless to perfect, by name."""
    wrong_every_third = [[token if n % 3 else (token + 1) % 64 for n, token in enumerate(row)] for row in answers]
    return {
        "another_model": DraftLM(tiny_llama(seed=2), 64),
        "the_target_itself": DraftLM(target.model, 64),
        "prompt_lookup": PromptLookup(target.device),
        "script_wrong_every_third": Scripted(wrong_every_third),
        "nothing_to_propose": Scripted([[]] * 4),
    }


NAMES = ["another_model", "the_target_itself", "prompt_lookup", "script_wrong_every_third", "nothing_to_propose"]


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("gamma", [1, 3, 5])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_output_is_plain_greedy_output(target, answers, proposers, name, gamma, batch_size):
    if name.startswith(("script", "nothing")) and batch_size == 1:
        pytest.skip("the script goes by batch row")
    config = DecodeConfig(num_speculative_tokens=gamma, max_new_tokens=24, batch_size=batch_size)
    assert generate(target, PROMPTS, config, proposers[name]) == answers


def test_plain_decoding_is_the_oracles(target, answers):
    for batch_size in (1, 2, 4):
        config = DecodeConfig(num_speculative_tokens=0, max_new_tokens=24, batch_size=batch_size)
        assert generate(target, PROMPTS, config) == answers


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("verification", ["token", "block"])
def test_a_draft_equal_to_the_target_is_always_accepted(target, temperature, verification):
    config = DecodeConfig(num_speculative_tokens=4, max_new_tokens=21, temperature=temperature, verification=verification)
    generations, _ = decode(target, requests_for(PROMPTS), config, DraftLM(target.model, 64), measure_overlap=True)
    rounds = [round_ for generation in generations for round_ in generation.rounds]
    assert all(round_.num_accepted == len(round_.drafted) for round_ in rounds)
    assert all(overlap == pytest.approx(1.0, abs=1e-5) for round_ in rounds for overlap in round_.overlap)


def test_rounds_hold_exactly_the_tokens_after_the_first(target, tiny_llama):
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=20)
    generations, timing = decode(target, requests_for(PROMPTS), config, DraftLM(tiny_llama(seed=2), 64), mode=SPECULATIVE)
    for generation in generations:
        committed = [token for round_ in generation.rounds for token in round_.committed]
        assert list(generation.tokens[1:]) == committed
        assert generation.stop_reason == "length"
        assert len(generation.tokens) == 20
    assert timing.num_tokens == 4 * 19
    assert timing.num_rounds == sum(len(generation.rounds) for generation in generations)


@pytest.mark.parametrize("where", range(1, 8))
def test_end_of_text_in_any_slot_of_a_block_ends_the_answer_there(tiny_llama, as_target, answers, where):
    end = answers[0][where]
    if end in answers[0][:where]:
        pytest.skip("the token occurs earlier")
    target = as_target(tiny_llama(seed=1), eos=(end,))
    config = DecodeConfig(num_speculative_tokens=5, max_new_tokens=24)
    (generation,), _ = decode(target, requests_for(PROMPTS[:1]), config, Scripted([answers[0]]))
    assert list(generation.tokens) == answers[0][: where + 1]
    assert generation.stop_reason == "eos"
    last = generation.rounds[-1]
    assert last.committed[-1] == end
    assert last.num_accepted == len([token for token in last.drafted[: len(last.committed)] if token in last.committed])


@pytest.mark.parametrize("max_new_tokens", range(1, 9))
def test_the_answer_is_never_longer_than_asked_and_no_draft_is_wasted_beyond(target, answers, max_new_tokens):
    config = DecodeConfig(num_speculative_tokens=4, max_new_tokens=max_new_tokens)
    (generation,), _ = decode(target, requests_for(PROMPTS[:1]), config, Scripted([answers[0]]))
    assert list(generation.tokens) == answers[0][:max_new_tokens]
    assert all(len(round_.drafted) == len(round_.committed) - 1 for round_ in generation.rounds)


@pytest.mark.parametrize("max_new_tokens", range(1, 6))
@pytest.mark.parametrize("name", ["another_model", "prompt_lookup"])
def test_answers_with_room_for_no_or_few_drafts_are_the_oracles(target, answers, proposers, name, max_new_tokens):
    config = DecodeConfig(num_speculative_tokens=4, max_new_tokens=max_new_tokens, batch_size=4)
    for _ in range(2):  # a proposer used before must not remember
        assert generate(target, PROMPTS, config, proposers[name]) == [answer[:max_new_tokens] for answer in answers]


@pytest.mark.parametrize("length", [12, 13, 14, 15])
def test_rows_reach_the_end_of_the_context_each_in_its_own_time(tiny_llama, as_target, length):
    target = as_target(tiny_llama(seed=1, max_position_embeddings=16))
    prompts = [[5] * length, [9, 4]]
    config = DecodeConfig(num_speculative_tokens=4, max_new_tokens=100, batch_size=2)
    expected = [oracle(target.model, prompt, 16 - len(prompt)) for prompt in prompts]
    assert generate(target, prompts, config, DraftLM(tiny_llama(seed=2), 64)) == expected


def test_decoding_stops_at_the_end_of_the_context(tiny_llama, as_target):
    target = as_target(tiny_llama(seed=1, max_position_embeddings=16))
    config = DecodeConfig(num_speculative_tokens=4, max_new_tokens=100)
    (generation,), _ = decode(target, requests_for([[5] * 10]), config, DraftLM(target.model, 64))
    assert generation.stop_reason == "context"
    assert len(generation.tokens) == 6


@pytest.mark.parametrize("prompt", [[], [3] * 256, [3] * 300])
def test_a_prompt_that_cannot_be_continued_is_refused(target, prompt):
    with pytest.raises(InputError, match="prompt p0"):
        decode(target, requests_for([prompt]), DecodeConfig())


@pytest.mark.parametrize("verification", ["token", "block", "match"])
def test_a_request_gets_the_same_sampled_tokens_in_any_batch(target, tiny_llama, verification):
    config = DecodeConfig(
        num_speculative_tokens=3, max_new_tokens=16, temperature=1.0, top_k=20, top_p=0.9, verification=verification
    )
    assert_same_alone(target, config, DraftLM(tiny_llama(seed=2), 64))


def test_sample_and_match_draws_the_very_tokens_of_plain_sampling(target):
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=24, temperature=1.0, verification="match")
    plain, _ = decode(target, requests_for(PROMPTS), config)
    matched, _ = decode(target, requests_for(PROMPTS), config, PromptLookup(target.device))
    assert [generation.tokens for generation in matched] == [generation.tokens for generation in plain]


def test_a_request_whose_logits_are_not_finite_fails_alone(tiny_llama, as_target):
    model = tiny_llama(seed=1)
    with torch.no_grad():
        model.get_input_embeddings().weight[40] = float("nan")
    target = as_target(model)
    config = DecodeConfig(num_speculative_tokens=2, max_new_tokens=8)
    healthy = [[7, 12, 3], [20, 9]]
    alone, _ = decode(target, requests_for(healthy), config, PromptLookup(target.device))
    mixed, _ = decode(target, requests_for([*healthy, [40]]), config, PromptLookup(target.device))
    assert [generation.stop_reason for generation in mixed] == [*(each.stop_reason for each in alone), "non_finite"]
    assert [generation.tokens for generation in mixed[:2]] == [generation.tokens for generation in alone]


def test_a_request_that_fails_under_way_leaves_nothing_that_is_no_number(tiny_llama, as_target, answers):
    at = next(n for n, token in enumerate(answers[0]) if n > 2 and token not in [*answers[0][:n], *answers[1], *PROMPTS[1]])
    model = tiny_llama(seed=1)
    with torch.no_grad():
        model.get_input_embeddings().weight[answers[0][at]] = float("nan")
    config = DecodeConfig(num_speculative_tokens=2, max_new_tokens=24)
    draft = DraftLM(tiny_llama(seed=2), 64)
    (failed, healthy), _ = decode(as_target(model), requests_for(PROMPTS[:2]), config, draft, measure_overlap=True)
    assert (failed.stop_reason, healthy.stop_reason) == ("non_finite", "length")
    assert list(failed.tokens) == answers[0][: len(failed.tokens)]
    assert list(healthy.tokens) == answers[1]
    assert failed.rounds[-1].committed == failed.rounds[-1].overlap == ()
    overlaps = [overlap for each in (failed, healthy) for round_ in each.rounds for overlap in round_.overlap or ()]
    assert all(0 <= overlap <= 1 + 1e-6 for overlap in overlaps)


def test_a_request_that_fails_in_the_prefill_counts_no_tokens(tiny_llama, as_target):
    model = tiny_llama(seed=1)
    with torch.no_grad():
        model.get_input_embeddings().weight[40] = float("nan")
    (generation,), timing = decode(as_target(model), requests_for([[40]]), DecodeConfig())
    assert generation.tokens == ()
    assert (timing.num_tokens, timing.num_rounds) == (0, 0)


@pytest.mark.parametrize("verification", ["token", "block"])
def test_a_draft_with_nan_logits_fails_sampled_requests_and_only_slows_greedy_ones(target, answers, tiny_llama, verification):
    broken = tiny_llama(seed=2)
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=12, verification=verification)
    sampled = config.model_copy(update={"temperature": 1.0})
    generations, _ = decode(target, requests_for(PROMPTS), sampled, DraftLM(broken, 64))
    assert {generation.stop_reason for generation in generations} == {"non_finite"}
    greedy, _ = decode(target, requests_for(PROMPTS), config, DraftLM(broken, 64), measure_overlap=True)
    assert [list(generation.tokens) for generation in greedy] == [answer[:12] for answer in answers]
    assert {overlap for generation in greedy for round_ in generation.rounds for overlap in round_.overlap or ()} == {0.0}


def test_overlap_is_recorded_for_judged_drafts_only(tiny_llama, as_target, answers):
    end = next(token for n, token in enumerate(answers[0]) if n > 1 and token not in answers[0][:n])
    model = tiny_llama(seed=1)
    config = DecodeConfig(num_speculative_tokens=5, max_new_tokens=24)
    target = as_target(model, eos=(end,))
    (generation,), _ = decode(target, requests_for(PROMPTS[:1]), config, DraftLM(model, 64), measure_overlap=True)
    last = generation.rounds[-1]
    assert last.committed[-1] == end
    assert last.num_accepted < len(last.drafted)
    assert len(last.overlap) == last.num_accepted  # what stands behind the end of the text was not judged
    (generation,), _ = decode(
        as_target(model), requests_for(PROMPTS[:1]), config, DraftLM(tiny_llama(seed=2), 64), measure_overlap=True
    )
    for round_ in generation.rounds:
        assert len(round_.overlap or ()) == min(round_.num_accepted + 1, len(round_.drafted))


def test_a_draft_with_padded_rows_in_its_vocabulary_still_decodes_losslessly(target, answers, tiny_llama):
    padded = DraftLM(tiny_llama(seed=2, vocab_size=80), 64)
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=24, batch_size=4)
    assert generate(target, PROMPTS, config, padded) == answers
    sampled = DecodeConfig(num_speculative_tokens=3, max_new_tokens=12, temperature=1.0)
    generations, _ = decode(target, requests_for(PROMPTS), sampled, padded)
    assert all(token < 64 for generation in generations for round_ in generation.rounds for token in round_.drafted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_has_no_embedding_for_some_of_the_targets_tokens_reads_on(target, tiny_llama, temperature):
    smaller = DraftLM(tiny_llama(seed=2, vocab_size=20), 20)
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=24, temperature=temperature)
    generations, _ = decode(target, requests_for(PROMPTS), config, smaller)
    assert any(token >= 20 for generation in generations for token in generation.tokens)
    assert all(token < 20 for generation in generations for round_ in generation.rounds for token in round_.drafted)
    if temperature == 0:
        plain, _ = decode(target, requests_for(PROMPTS), config)
        assert [generation.tokens for generation in generations] == [generation.tokens for generation in plain]


@pytest.mark.parametrize("order", [[0, 0, 0], [1, 0, 1, 2, 0]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_prompts_are_read_once_and_answered_each_for_itself(target, tiny_llama, order, temperature, monkeypatch):
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=12, temperature=temperature)
    requests = requests_for([PROMPTS[number] for number in order])
    draft = DraftLM(tiny_llama(seed=2), 64)
    alone = [decode(target, [request], config, draft)[0][0].tokens for request in requests]
    seen, told = [], []

    def watch(model, cache, ids_BT, *others):
        seen.append(len(ids_BT))
        return forward_states(model, cache, ids_BT, *others)

    monkeypatch.setattr("eval.decoder.batch.forward_states", watch)
    start = draft.start
    monkeypatch.setattr(draft, "start", lambda *others: (told.append(others[-1].final_BTE.shape[0]), start(*others)))
    together, _ = decode(target, requests, config, draft)

    assert (seen[0], told) == (len(set(order)), [len(order)])
    assert [generation.tokens for generation in together] == alone
