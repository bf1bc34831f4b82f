"""With a logits processor the decoder follows the processed target's distribution: chains and trees, greedy and drawn."""

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import DynamicTree, StaticTree
from eval.decoder.decode import decode, generate
from heads.proposers.draft_lm import DraftLM
from tests.support.decoding import PROMPTS, KnownAnswers, requests_for

EOS = (60,)
GREEDY = DecodeConfig(num_speculative_tokens=3, max_new_tokens=16, batch_size=4)
SHAPES = {"chain": None, "grown tree": DynamicTree(kind="dynamic", num_nodes=9, width=3)}


class BanSumOfLastTwo(LogitsProcessor):
    """Forbids the token that is the sum of the last two, and likes the one after the last."""

    def __call__(self, input_ids, scores):
        rows, scores = torch.arange(len(input_ids)), scores.clone()
        scores[rows, (input_ids[:, -1] + 1) % 64] += 1.0
        scores[rows, input_ids[:, -2:].sum(1) % 64] = float("-inf")
        return scores


PROCESSORS = {
    "repetition penalty": RepetitionPenaltyLogitsProcessor(1.7),
    "bad words and a least length": LogitsProcessorList(
        [
            NoBadWordsLogitsProcessor([[47], [32, 24]], eos_token_id=list(EOS)),
            MinLengthLogitsProcessor(14, list(EOS), device="cpu"),
        ]
    ),
    "of the last two": BanSumOfLastTwo(),
}


@pytest.fixture(scope="module")
def models(tiny_llama):
    return tiny_llama(seed=1, dtype=torch.float32), tiny_llama(seed=2, dtype=torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PROCESSORS)
def test_greedy_output_is_that_of_transformers_with_the_same_processor(as_target, models, name, shape):
    model, draft = models
    target, processor = as_target(model, eos=EOS), PROCESSORS[name]
    expected, bare = [], []
    for prompt in PROMPTS:
        ids_1T = torch.tensor([prompt])
        options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": list(EOS), "pad_token_id": 0}
        chain = processor if isinstance(processor, LogitsProcessorList) else LogitsProcessorList([processor])
        expected.append(model.generate(ids_1T, logits_processor=chain, **options)[0, len(prompt) :].tolist())
        bare.append(model.generate(ids_1T, **options)[0, len(prompt) :].tolist())
    assert expected != bare
    config = GREEDY.model_copy(update={"tree": SHAPES[shape]})
    for drafter in (DraftLM(draft, 64), DraftLM(model, 64)):
        assert generate(target, PROMPTS, config, drafter, logits_processor=processor) == expected
    assert generate(target, PROMPTS, config, None, logits_processor=processor) == expected


class Trie:
    """Which tokens may follow, by the number of a prompt: one of some phrases, and then the end; any other text is an error."""

    def __init__(self, phrases):
        self.phrases, self.asked = phrases, []

    def __call__(self, batch_id, ids_T):
        prompt = PROMPTS[batch_id]
        assert ids_T[: len(prompt)].tolist() == prompt
        answer = tuple(ids_T[len(prompt) :].tolist())
        self.asked.append((batch_id, answer))
        ended = [(*phrase, *EOS) for phrase in self.phrases[batch_id]]
        return sorted(
            {phrase[len(answer)] for phrase in ended if phrase[: len(answer)] == answer and len(phrase) > len(answer)}
        )


PHRASES = [
    [(5, 6), (5, 7, 8, 9, 10), (11, 12, 13)],
    [(20,), (21, 22, 23, 24, 25)],
    [(30, 31, 32, 33), (34, 35)],
    [(40, 41, 42), (40, 43, 44, 45, 46, 47)],
]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_constraint_by_prefix_is_kept_and_never_asked_where_it_knows_no_way_on(as_target, models, shape):
    """transformers raises where the trie has no token that may follow: behind a forbidden draft, and behind the end."""
    model, draft = models
    expected = []
    for number, prompt in enumerate(PROMPTS):
        own = PrefixConstrainedLogitsProcessor(lambda _, ids_T, number=number: Trie(PHRASES)(number, ids_T), 1)
        options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": list(EOS), "pad_token_id": 0}
        found = model.generate(torch.tensor([prompt]), logits_processor=LogitsProcessorList([own]), **options)
        expected.append(found[0, len(prompt) :].tolist())
    assert all(tuple(answer[:-1]) in phrases for answer, phrases in zip(expected, PHRASES, strict=True))
    config = GREEDY.model_copy(update={"tree": SHAPES[shape], "batch_size": 2})
    drafters = [DraftLM(draft, 64), DraftLM(model, 64)] + [KnownAnswers(PROMPTS, expected)] * (shape == "chain")
    for drafter in drafters:
        trie = Trie(PHRASES)
        processor = PrefixConstrainedLogitsProcessor(trie, 1)
        answers = generate(as_target(model, eos=EOS), PROMPTS, config, drafter, logits_processor=processor)
        assert answers == expected
    if shape == "chain":  # all drafts were right, and every text was asked about once
        texts = [(number, tuple(answer[:end])) for number, answer in enumerate(expected) for end in range(len(answer))]
        assert sorted(trie.asked) == texts


def forbidden_in(generations):
    """Count the tokens that `BanSumOfLastTwo` forbids."""
    texts = [([*each.prompt_tokens, *each.tokens], len(each.prompt_tokens)) for each in generations]
    return sum(text[at] == sum(text[at - 2 : at]) % 64 for text, start in texts for at in range(start, len(text)) if at > 1)


@pytest.mark.parametrize(
    ("shape", "verification"), [("chain", "token"), ("chain", "block"), ("chain", "match"), ("static tree", None)]
)
def test_drawn_output_never_has_what_the_processor_forbids_and_matched_output_is_plain(as_target, models, shape, verification):
    tree = StaticTree(kind="static", branching=[3, 2, 1]) if shape == "static tree" else None
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=8, temperature=2.0, tree=tree, verification=verification)
    target, draft = as_target(models[0]), DraftLM(models[1], 64)
    requests, processor = requests_for(PROMPTS * 25), BanSumOfLastTwo()
    found, _ = decode(target, requests, config, draft, logits_processor=processor)
    assert forbidden_in(found) == 0
    assert forbidden_in(decode(target, requests, config, draft)[0]) > 5
    if verification == "match":
        plain, _ = decode(target, requests, config, logits_processor=processor)
        assert [each.tokens for each in found] == [each.tokens for each in plain]


def test_what_would_not_be_exact_is_refused(as_target, models):
    class SynthIDTextWatermarkLogitsProcessor(BanSumOfLastTwo):
        """Stands for transformers' own, which wants more than a test has."""

    class Derived(SynthIDTextWatermarkLogitsProcessor):
        """Has another name."""

    target, drafter = as_target(models[0]), DraftLM(models[1], 64)
    requests = requests_for([(1, 2)])
    with pytest.raises(InputError, match="Derived remembers earlier calls"):
        decode(target, requests, GREEDY, drafter, logits_processor=[LogitsProcessorList([Derived()])])
    with pytest.raises(InputError, match="remembers earlier calls"):
        decode(target, requests, GREEDY, drafter, logits_processor=SynthIDTextWatermarkLogitsProcessor())
    with pytest.raises(InputError, match="the overlap of distributions"):
        decode(target, requests, GREEDY, drafter, measure_overlap=True, logits_processor=BanSumOfLastTwo())
    with pytest.raises(InputError, match=r"made scores of shape \[1, 63\] of \[1, 64\]"):
        decode(target, requests, GREEDY, drafter, logits_processor=lambda _, scores: scores[:, 1:])
