"""The decoder where little room is left, something is no number, vocabularies differ, prompts are equal.

That what it gives is plain decoding's is tested in `test_matrix`.
"""

from dataclasses import replace

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig, DynamicTree, StaticTree
from eval.decoder.decode import decode, generate
from heads.frozen.hidden_states import blocks, forward_states
from heads.proposers.draft_lm import DraftLM
from tests.support.corrected import corrected
from tests.support.decoding import PROMPTS, requests_for

PLAIN = DecodeConfig(num_speculative_tokens=0, max_new_tokens=24)
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.6}


@pytest.fixture(scope="module")
def answers(target):
    return generate(target, PROMPTS, PLAIN)


@pytest.fixture(scope="module")
def draft(tiny_llama):
    """A draft of another model, hardly ever right."""
    return DraftLM(tiny_llama(seed=2), 64)


@pytest.mark.parametrize("prompts", ["w1 w2", [7, 12], [[7.5]]])
def test_prompts_that_are_no_lists_of_token_ids_are_refused_with_what_is_accepted(target, prompts):
    with pytest.raises(TypeError, match=r"expected a list of lists of token ids, got .*target\.encode_chat"):
        generate(target, prompts, PLAIN)
    assert generate(target, torch.tensor([[7, 12]]), PLAIN) == generate(target, [[7, 12]], PLAIN)


@pytest.fixture
def failing_after(tiny_llama, as_target):
    """A function that makes the target compute no numbers after one token."""

    def make(token):
        model = tiny_llama(seed=1)
        with torch.no_grad():
            model.get_input_embeddings().weight[token] = float("nan")
        return as_target(model)

    return make


def tokens_of(generations):
    return [list(generation.tokens) for generation in generations]


def rounds_of(generations):
    return [round_ for generation in generations for round_ in generation.rounds]


@pytest.mark.parametrize("penalties", [{}, PENALTIES], ids=["", "penalties"])
@pytest.mark.parametrize(("temperature", "verification"), [(0.0, "token"), (0.8, "token"), (0.8, "block")])
def test_a_draft_equal_to_the_target_is_always_accepted(target, temperature, verification, penalties):
    sampling = {"temperature": temperature, "verification": verification} | penalties
    config = DecodeConfig(num_speculative_tokens=4, max_new_tokens=21, **sampling)
    generations, _ = decode(target, requests_for(PROMPTS), config, DraftLM(target.model, 64), measure_overlap=True)
    assert all(round_.num_accepted == len(round_.drafted) for round_ in rounds_of(generations))
    assert all(overlap == pytest.approx(1.0, abs=1e-5) for round_ in rounds_of(generations) for overlap in round_.overlap)


def test_greedy_tokens_with_a_repetition_penalty_are_those_of_transformers(target, answers):
    penalised = generate(target, PROMPTS, PLAIN.model_copy(update={"repetition_penalty": 1.5}))
    for prompt, answer, unpenalised in zip(PROMPTS, penalised, answers, strict=True):
        settings = {"max_new_tokens": 24, "do_sample": False, "repetition_penalty": 1.5, "eos_token_id": None}
        assert target.model.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist() == answer != unpenalised


@pytest.mark.parametrize("prompt", [[], [3] * 256, [3] * 300, [3, 64], [-1]])
def test_a_prompt_that_cannot_be_continued_is_refused(target, prompt):
    with pytest.raises(InputError, match="prompt p0"):
        decode(target, requests_for([prompt]), DecodeConfig())


def test_a_later_turn_draws_other_numbers_than_the_first(target, draft):
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=12, temperature=1.0)
    (request,) = requests_for(PROMPTS[:1])
    for proposer in (None, draft):
        first, again, later = tokens_of(decode(target, [request, request, replace(request, turn=1)], config, proposer)[0])
        assert first == again != later


def test_a_request_that_fails_under_way_leaves_nothing_that_is_no_number(failing_after, draft, answers):
    at = next(n for n, token in enumerate(answers[0]) if n > 2 and token not in [*answers[0][:n], *answers[1], *PROMPTS[1]])
    config = DecodeConfig(num_speculative_tokens=2, max_new_tokens=24)
    target = failing_after(answers[0][at])
    (failed, healthy), _ = decode(target, requests_for(PROMPTS[:2]), config, draft, measure_overlap=True)
    assert (failed.stop_reason, healthy.stop_reason) == ("non_finite", "length")
    assert list(failed.tokens) == answers[0][: len(failed.tokens)]
    assert list(healthy.tokens) == answers[1]
    assert failed.rounds[-1].committed == failed.rounds[-1].overlap == ()
    assert all(0 <= overlap <= 1 + 1e-6 for round_ in rounds_of([failed, healthy]) for overlap in round_.overlap or ())


def test_overlap_is_recorded_for_judged_drafts_only(target, as_target, answers):
    end = next(token for n, token in enumerate(answers[0]) if n > 1 and token not in answers[0][:n])
    config, requests = DecodeConfig(num_speculative_tokens=5, max_new_tokens=24), requests_for(PROMPTS[:1])
    ending = as_target(target.model, eos=(end,))
    (generation,), _ = decode(ending, requests, config, DraftLM(target.model, 64), measure_overlap=True)
    last = generation.rounds[-1]
    assert last.committed[-1] == end
    assert last.num_accepted < len(last.drafted)
    assert len(last.overlap) == last.num_accepted  # what stands behind the end of the text was not judged


@pytest.mark.parametrize(("num_rows", "num_known"), [(80, 64), (20, 20)], ids=["padded rows", "too few embeddings"])
def test_a_draft_with_more_or_fewer_embeddings_than_the_target_has_tokens_reads_on(
    target, answers, tiny_llama, num_rows, num_known
):
    draft = DraftLM(tiny_llama(seed=2, vocab_size=num_rows), num_known)
    greedy = DecodeConfig(num_speculative_tokens=3, max_new_tokens=24)
    for config in (greedy, greedy.model_copy(update={"temperature": 1.0, "verification": "block"})):
        generations, _ = decode(target, requests_for(PROMPTS), config, draft)
        assert all(token < num_known for round_ in rounds_of(generations) for token in round_.drafted)
        assert any(token >= 20 for tokens in tokens_of(generations) for token in tokens)
        assert config.temperature > 0 or tokens_of(generations) == answers


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_prompts_are_read_once_and_answered_each_for_itself(target, draft, temperature, monkeypatch):
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=12, temperature=temperature)
    requests = requests_for([PROMPTS[number] for number in (1, 0, 1, 2, 0)])
    alone = [decode(target, [request], config, draft)[0][0] for request in requests]
    seen, told = [], []

    def watch(model, cache, ids_BT, *others):
        seen.append(len(ids_BT))
        return forward_states(model, cache, ids_BT, *others)

    monkeypatch.setattr("eval.decoder.batch.forward_states", watch)
    start = draft.start
    monkeypatch.setattr(draft, "start", lambda *others: (told.append(others[-1].final_BTE.shape[0]), start(*others)))
    together, _ = decode(target, requests, config, draft)

    assert (seen[0], told) == (3, [5])
    assert tokens_of(together) == tokens_of(alone)


# --- what the models read -----------------------------------------------------------------------------------------


def lengths_read(model):
    """Return a list that is told how many tokens a row goes through a model's first block in each forward."""
    lengths = []
    blocks(model)[0].register_forward_hook(lambda _, args, output: lengths.append(args[0].shape[1]))
    return lengths


@pytest.mark.parametrize("right", [(3,), (0,), (3, 0, 2, 3, 1)], ids=["all", "none", "some"])
def test_a_round_of_a_chain_reads_each_token_once(as_target, tiny_llama, right):
    """The target reads the pending token and G drafts; the draft all but the last, which it lacks after a full acceptance."""
    target, model = as_target(tiny_llama(seed=1)), tiny_llama(seed=2)
    requests = requests_for(PROMPTS[:1])
    (alone,), _ = decode(target, requests, PLAIN)
    proposer = corrected(DraftLM(model, 64), [[*PROMPTS[0], *alone.tokens]], right)
    by_target, by_draft = lengths_read(target.model), lengths_read(model)
    (generation,), _ = decode(target, requests, PLAIN.model_copy(update={"num_speculative_tokens": 3}), proposer)
    assert generation.tokens == alone.tokens
    expected, whole = [len(PROMPTS[0])], False
    for round_ in generation.rounds:
        if round_.drafted:
            expected += [2 if whole else 1] + [1] * (len(round_.drafted) - 1)
        whole = round_.num_accepted == len(round_.drafted) > 0
    assert by_target == [len(PROMPTS[0]), *(1 + len(round_.drafted) for round_ in generation.rounds)]
    assert by_draft == expected


# --- what is no number, or no token -----------------------------------------------------------------------------------

HEALTHY, BROKEN, MARK = [[7, 12, 3], [20, 9], [31, 5, 6], [13, 11], [50, 2], [8]], [40, 5], 40
SHAPES = {
    "greedy chain": {},
    "sampled chain": {"temperature": 1.0, "verification": "block"},
    "greedy tree": {"tree": StaticTree(kind="static", branching=[3, 2, 1])},
    "grown tree": {"tree": DynamicTree(kind="dynamic", num_nodes=9, width=3)},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("whose", ["target", "draft"])
def test_what_is_no_number_ends_its_own_request_and_no_other(shape, whose, tiny_llama, as_target):
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=8, **SHAPES[shape])
    models = {"target": tiny_llama(seed=1), "draft": tiny_llama(seed=2)}
    target, draft = as_target(models["target"]), DraftLM(models["draft"], 64)
    unbroken, _ = decode(target, requests_for([*HEALTHY, BROKEN]), config.model_copy(update={"num_speculative_tokens": 0}))
    with torch.no_grad():
        models[whose].get_input_embeddings().weight[MARK] = float("nan")
    mixed, _ = decode(target, requests_for([*HEALTHY, BROKEN]), config, draft)
    # The others may come upon the same token by themselves; then they end as they would alone.
    again, _ = decode(target, requests_for(HEALTHY), config, draft)
    assert [each.tokens for each in mixed[:-1]] == [each.tokens for each in again]
    assert any(each.stop_reason == "length" for each in again)
    drawn_from_the_draft = shape == "sampled chain"
    if whose == "target" or drawn_from_the_draft:
        assert mixed[-1].stop_reason == "non_finite"
    else:  # drafts that are not drawn from a distribution cost nothing but time
        assert mixed[-1].stop_reason == "length"
        assert mixed[-1].tokens == unbroken[-1].tokens
