"""A stop string ends the answer with the token that completes it, wherever that token stands and however it was decoded."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from configs.schema.decoding import DecodeConfig
from eval.decoder.decode import decode, generate
from eval.decoder.records import StopStrings
from tests.support.decoding import PROMPTS, KnownAnswers, requests_for

END = "<end>"


def byte_level(merges=()):
    """Return a tokenizer of a token a byte, and one for each merge, as GPT-2's and its successors' are made."""
    vocab = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for merge in merges:
        vocab["".join(merge)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


MERGED = byte_level([("a", "b"), ("ab", "c"), ("Ã", "©"), ("Ġ", "a")])


def ended_at(tokenizer, stops, tokens):
    """Return how many tokens there are when the search first says so."""
    search = StopStrings(tokenizer, stops)
    return next((n for n, token in enumerate(tokens, 1) if search.completes(token)), None)


def ended_at_naively(tokenizer, stops, tokens):
    texts = (tokenizer.decode(tokens[:n], clean_up_tokenization_spaces=False) for n in range(1, len(tokens) + 1))
    return next((n for n, text in enumerate(texts, 1) if any(stop in text for stop in stops)), None)


@given(text=st.text(alphabet="abc é€😀\n", min_size=40, max_size=120), start=st.integers(20, 100), length=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_the_search_in_a_tail_finds_what_a_search_in_the_whole_text_finds(text, start, length):
    tokens, stop = MERGED(text)["input_ids"], text[start : start + length] or "never"
    assert ended_at(MERGED, [stop], tokens) == ended_at_naively(MERGED, [stop], tokens)


def test_tokens_without_text_do_not_push_the_beginning_of_a_stop_out_of_sight():
    class Silent:
        def decode(self, tokens, **kwargs):
            return "".join("" if token == 0 else chr(token) for token in tokens)

    tokens = [*map(ord, "xxxxxstop"[:7]), *[0] * 200, *map(ord, "op")]
    assert ended_at(Silent(), ["stop"], tokens) == len(tokens)


# --- in the decoder -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tiny_llama, as_target):
    tokenizer = byte_level()
    return replace(as_target(tiny_llama(seed=1, vocab_size=len(tokenizer))), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def answers(target):
    return generate(target, PROMPTS, DecodeConfig(num_speculative_tokens=0, max_new_tokens=24))


def stop_behind(target, answer, where):
    """Return the text of three tokens up to `where`; None where it stands earlier too, or is no whole text."""
    stop = target.tokenizer.decode(answer[max(0, where - 2) : where + 1])
    if "\ufffd" in stop or ended_at_naively(target.tokenizer, [stop], answer) != where + 1:
        return None
    return stop


def test_a_stop_in_any_slot_and_across_rounds_ends_every_answer_where_plain_decoding_does(target, answers):
    config, found, draft = DecodeConfig(num_speculative_tokens=3, max_new_tokens=24), 0, KnownAnswers(PROMPTS, answers)
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        for where in range(24):
            stop = stop_behind(target, answer, where)
            if stop is None:
                continue
            found += 1
            stopping = config.model_copy(update={"stop": [stop]})
            (generation,), _ = decode(target, requests_for([prompt]), stopping, draft)
            assert list(generation.tokens) == answer[: where + 1]
            assert generation.stop_reason == "stop"
            assert all(round_.num_accepted == min(len(round_.drafted), len(round_.committed)) for round_ in generation.rounds)
    assert found > 12


@pytest.mark.parametrize("stop", [[], [""], ["a\ufffd"]])
def test_strings_that_cannot_be_found_are_refused(stop):
    with pytest.raises(ValidationError, match=r"one character or more|U\+FFFD"):
        DecodeConfig(stop=stop)
