"""The split: stable, by the text alone, and clean of what is held out."""

import pytest

from configs.runtime.errors import InputError
from distill.generation.prompts import Prompt
from distill.generation.split import DUPLICATE, OVERLAP, hash_position, split_prompts, word_grams


def prompt(text, number=0, **more):
    return Prompt(prompt_id=f"{text[:20]}-{number}", category="c", turns=(text,), **more)


PROMPTS = [prompt(f"question number {number}") for number in range(400)]
HELD_OUT = next(p.user_text for p in PROMPTS if hash_position(p.user_text) < 0.1)


def texts(prompts):
    return {p.user_text for p in prompts}


def test_about_the_share_asked_for_is_held_out_and_nothing_is_lost():
    split = split_prompts(PROMPTS, 0.1)
    assert 20 <= len(split.held_out) <= 60
    assert texts(split.train) | texts(split.held_out) == texts(PROMPTS)
    assert not texts(split.train) & texts(split.held_out)


def test_a_prompt_stays_on_its_side_whatever_else_is_there():
    whole, half = split_prompts(PROMPTS, 0.1), split_prompts(PROMPTS[::-2], 0.1)
    assert texts(half.held_out) == texts(whole.held_out) & texts(PROMPTS[::-2])


def test_a_larger_share_only_adds_to_what_is_held_out():
    assert texts(split_prompts(PROMPTS, 0.1).held_out) < texts(split_prompts(PROMPTS, 0.3).held_out)


def test_the_position_is_fixed_for_good():
    # First 53 bits of SHA-256("abc") = ba7816bf8f01cfea...; a change here would move prompts between the sides.
    assert hash_position(" ABC\n") == (0xBA7816BF8F01CFEA >> 11) / 2**53


def test_duplicates_are_dropped_whatever_their_case_and_spacing_and_the_first_stays():
    copies = [prompt(text.upper().replace(" ", "  "), 1) for text in ("question number 1", "question number 2")]
    split = split_prompts([*PROMPTS, *copies], 0.1)
    assert split.dropped[DUPLICATE] == 2
    assert not {p.prompt_id for p in copies} & {p.prompt_id for p in (*split.train, *split.held_out)}


def test_a_train_prompt_that_shares_13_words_with_a_held_out_one_is_dropped():
    shared = " ".join(f"word{n}" for n in range(13))
    held_out = next(text for n in range(500) if hash_position(text := f"{shared} tail {n}") < 0.1)
    train = next(text for n in range(500) if hash_position(text := f"Begin {n}: {shared.upper()}!") >= 0.1)
    short = train.replace("WORD12", "other")
    assert hash_position(short) >= 0.1
    split = split_prompts([prompt(text) for text in (held_out, train, short)], 0.1)
    assert texts(split.train) == {short}
    assert split.dropped[OVERLAP] == 1


def test_a_shared_system_message_is_no_overlap():
    system = {"role": "system", "content": " ".join(f"rule{n}" for n in range(40))}
    split = split_prompts([prompt(p.user_text, history=(system,)) for p in PROMPTS], 0.1)
    assert split.dropped == {DUPLICATE: 0, OVERLAP: 0}


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_split_with_an_empty_side_is_refused(share):
    with pytest.raises(InputError, match="both need at least one"):
        split_prompts(PROMPTS, share)


def test_grams_are_runs_of_words_without_punctuation():
    assert list(word_grams("One, two;\nTHREE four", 3)) == [("one", "two", "three"), ("two", "three", "four")]
    assert list(word_grams("too short", 3)) == []
