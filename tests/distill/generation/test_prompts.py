"""Prompts that fill the context, and the split into two sides."""

from dataclasses import replace

import pytest

from configs.runtime.errors import InputError
from distill.generation.bad_rows import LeftOut
from distill.generation.prompts import (
    DUPLICATE,
    OVERLAP,
    NearDuplicates,
    Prompt,
    choose_prompts,
    encode_prompt,
    fit_prompts,
    fold_chats,
    hash_position,
    split_prompts,
)
from distill.generation.row_forms import read_row

SAID, ASSISTANT = {"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}


def test_a_prompt_that_fills_the_context_is_refused_by_name_or_left_out_and_one_shorter_is_not(byte_target):
    template = len(byte_target.encode_chat([{"role": "user", "content": ""}]))
    longest = byte_target.max_positions - 1 - template
    fits, long = (Prompt(prompt_id=name, category="c", turns=("x" * n,)) for name, n in (("f", longest), ("long", longest + 1)))
    assert len(encode_prompt(byte_target, fits)) == 159
    with pytest.raises(InputError, match=r"prompt long has 160 tokens.*on_too_long"):
        fit_prompts(byte_target, [long, fits], LeftOut())
    left_out = LeftOut(on_too_long="skip", max_share=0.0)
    (kept,) = fit_prompts(byte_target, [long, fits], left_out)
    assert (kept, kept.num_tokens, left_out.counts) == (fits, 159, {"too_long": 1})
    left_out.check(1)  # what is too long is no bad row
    chat = [SAID, ASSISTANT, SAID, ASSISTANT | {"content": "x" * 150}, SAID]
    whole = read_row({"messages": chat}, "messages", "", setting="")
    assert fit_prompts(byte_target, [whole], LeftOut(), shortens=True)[0].messages == chat[:3]


def test_a_prompt_that_cannot_be_encoded_is_named_with_its_place(byte_target):
    cut_character = Prompt(prompt_id="p7", category="c", turns=("\ud83d",), where="file, line 7")
    with pytest.raises(InputError, match=r"file, line 7: prompt p7: target"):
        encode_prompt(byte_target, cut_character)


def test_prompts_are_drawn_from_all_of_a_file_and_fewer_are_some_of_more():
    prompts = [prompt(f"question number {number}") for number in range(1000)]
    drawn = choose_prompts(prompts, 200)
    places = [prompts.index(each) for each in drawn]
    assert (len(drawn), places) == (200, sorted(places))
    assert 350 < sum(places) / 200 < 650  # of the whole file
    assert {each.user_text for each in choose_prompts(prompts, 100)} < {each.user_text for each in drawn}
    held_out = [hash_position(each.user_text) < 0.1 for each in drawn]
    assert 8 <= sum(held_out) <= 32  # the draw is not the split's


def test_a_log_of_growing_chats_is_folded_into_its_chats():
    chat = [SAID, ASSISTANT, SAID | {"content": "And?"}, ASSISTANT, SAID | {"content": "Why?"}]
    one, two, three = (read_row({"messages": chat[:number]}, "messages", "", setting="") for number in (1, 3, 5))
    other = read_row({"messages": [*chat[:1], ASSISTANT | {"content": "Bye."}]}, "messages", "", setting="")
    same = replace(one, answer=ASSISTANT["content"])
    assert fold_chats([one, two, other, three, same, other]) == [other, three, other]
    turns = replace(one, turns=(*one.turns, "And?"))
    assert fold_chats([turns, replace(three, tools=({"name": "f"},)), one]) == [
        turns,
        replace(three, tools=({"name": "f"},)),
        one,
    ]


# --- the split ---------------------------------------------------------------------------------------------------


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
    assert split_prompts(PROMPTS, 0.3).held_out[: len(split.held_out)] == split.held_out  # a larger share only adds
    half = split_prompts(PROMPTS[::-2], 0.1)  # whatever else is there, a prompt stays on its side
    assert texts(half.held_out) == texts(split.held_out) & texts(PROMPTS[::-2])
    assert {PROMPTS.index(each) >= 200 for each in split.held_out[:8]} == {True, False}  # the first are of all sources


def test_all_requests_of_a_growing_chat_stand_on_one_side():
    def chat(name):
        history = ()
        for number in range(4):
            yield prompt(f"{name} asks {number}", history=history)
            history += ({"role": "user", "content": f"{name} asks {number}"}, {"role": "assistant", "content": "Yes."})

    split = split_prompts([request for number in range(60) for request in chat(f"user {number}")], 0.3)
    chats = [{each.user_text.split(" asks")[0] for each in side} for side in (split.train, split.held_out)]
    assert not chats[0] & chats[1]
    assert len(split.train) + len(split.held_out) == 240


def test_prompts_that_all_open_with_the_same_example_are_split_by_what_follows_it():
    example = ({"role": "user", "content": "Say yes."}, ASSISTANT)
    split = split_prompts([prompt(each.user_text, history=example) for each in PROMPTS], 0.1)
    assert 20 <= len(split.held_out) <= 60


def test_the_position_is_fixed_for_good():
    # First 53 bits of SHA-256("abc") = ba7816bf8f01cfea...; a change here would move prompts between the sides.
    assert hash_position(" ABC\n") == (0xBA7816BF8F01CFEA >> 11) / 2**53


def test_duplicates_are_dropped_whatever_their_case_and_spacing_and_the_first_stays():
    copies = [prompt(text.upper().replace(" ", "  "), 1) for text in ("question number 1", "question number 2")]
    split = split_prompts([*PROMPTS, *copies], 0.1)
    assert split.dropped[DUPLICATE] == 2
    assert not {p.prompt_id for p in copies} & {p.prompt_id for p in (*split.train, *split.held_out)}


@pytest.mark.parametrize(
    ("shared", "spoiled"),
    [
        (" ".join(f"word{n}" for n in range(13)), " ".join(f"word{n}" for n in range(12)) + " other"),
        ("春眠不觉晓处处闻啼鸟夜来风雨声", "花落知多少"),  # of which a character is a word
    ],
    ids=["words", "characters"],
)
def test_a_train_prompt_that_shares_13_words_with_a_held_out_one_is_dropped(shared, spoiled):
    held_out = next(text for n in range(500) if hash_position(text := f"{shared} tail {n}") < 0.1)
    train = next(text for n in range(500) if hash_position(text := f"Begin {n}: {shared.upper()}!") >= 0.1)
    short = next(text for n in range(500) if hash_position(text := f"Begin {n}: {spoiled}!") >= 0.1)
    split = split_prompts([prompt(text) for text in (held_out, train, short)], 0.1)
    assert texts(split.train) == {short}
    assert split.dropped[OVERLAP] == 1


def test_words_that_many_prompts_share_are_a_template_and_no_overlap_while_a_few_with_one_text_are_dropped():
    template = " ".join(f"rule{n}" for n in range(20))
    text = " ".join(f"word{n}" for n in range(13))
    many = [f"{template} Q{n}: {n}?" for n in range(200)]
    held_out = next(each for n in range(500) if hash_position(each := f"{text} tail {n}") < 0.1)
    few = [each for n in range(20) if hash_position(each := f"{template} A{n} {text}") >= 0.1][:10]
    split = split_prompts([prompt(each) for each in (*many, held_out, *few)], 0.1)
    assert len(split.train) + len(split.held_out) == len(many) + 1
    assert not texts(split.train) & set(few)
    assert split.dropped[OVERLAP] == len(few) == 10


def test_a_short_train_prompt_that_differs_from_a_held_out_one_by_punctuation_alone_is_dropped():
    short = [f"What is {n} and why" for n in range(100)]
    split = split_prompts([prompt(each) for text in short for each in (text, f"{text}?")], 0.1)
    held_out = {text.strip("?") for text in texts(split.held_out)}
    assert held_out
    assert not held_out & {text.strip("?") for text in texts(split.train)}
    assert len(split.train) + len(split.held_out) + split.dropped[OVERLAP] == 200


def test_a_prompt_with_a_turn_that_is_a_whole_held_out_prompt_is_dropped():
    opening = ({"role": "user", "content": "Hello."}, ASSISTANT)  # of all: none is on a side by it
    one = [prompt(f"tell {number}", history=opening) for number in range(100)]
    two = [replace(each, prompt_id=f"{each.prompt_id}-2", turns=(*each.turns, "Why?")) for each in one]
    split = split_prompts([*one, *two], 0.3)
    held_out = {text for each in split.held_out for text in each.user_texts}
    assert not held_out & {text for each in split.train for text in each.user_texts}
    assert split.dropped[OVERLAP] > 10


def test_a_shared_system_message_is_no_overlap():
    system = {"role": "system", "content": " ".join(f"rule{n}" for n in range(40))}
    split = split_prompts([prompt(p.user_text, history=(system,)) for p in PROMPTS], 0.1)
    assert split.dropped == {DUPLICATE: 0, OVERLAP: 0}


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_split_with_an_empty_side_is_refused(share):
    with pytest.raises(InputError, match="both need at least one"):
        split_prompts(PROMPTS, share)


def test_a_text_is_near_to_one_that_shares_half_of_its_runs_of_four_words():
    near, sea = NearDuplicates(), "Write a poem about the sea and a small boat"
    texts = (sea, "write a POEM, about the sea and a small ship", "Write a poem about mountains, not the sea", "too few words")
    assert [near.add(text) for text in texts] == [True, False, True, True]
    assert near.add("too few words")  # of a run there is none
