"""Self-seeding: taking any chat template apart, and turns that depend on nothing but seed and number."""

import copy
import re
from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest
from tokenizers import AddedToken

from configs.runtime.errors import InputError
from configs.runtime.loading import parse_yaml
from configs.schema.data import PromptKind, PromptsConfig
from distill.generation import self_seeding
from distill.generation.prompts import DUPLICATE
from distill.generation.self_seeding import (
    NEAR_DUPLICATE,
    SEEDS,
    TOO_SHORT,
    UNUSABLE,
    Writer,
    find_user_frame,
    lead,
    read_turn,
    self_seed,
)

LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' }}{% endif %}{% endfor %}"
)
GEMMA = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
WITH_SYSTEM = "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}" + GEMMA
CONFIG = PromptsConfig(num_prompts=6, max_prompt_tokens=100, top_p=1.0, category="seeded")
KINDS = {"free": 1, "question": 2, "code": 1}
STEERED = PromptsConfig(num_prompts=12, max_prompt_tokens=90, top_p=1.0, kinds=KINDS)


@pytest.fixture
def with_template(byte_target):
    def make(template):
        tokenizer = copy.deepcopy(byte_target.tokenizer)
        tokenizer.chat_template = template
        return replace(byte_target, tokenizer=tokenizer)

    return make


# --- the template -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "prefix", "end_text", "has_end_token"),
    [
        (LLAMA_2, "[INST]", "[/INST]", False),
        (GEMMA, "<|im_start|>user\n", "<|im_end|>", True),
        (WITH_SYSTEM, "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n", "<|im_end|>", True),
    ],
)
def test_templates_are_taken_apart_around_the_users_text(with_template, template, prefix, end_text, has_end_token):
    target = with_template(template)
    frame = find_user_frame(target, 10)
    assert target.tokenizer.decode(list(frame.prefix_ids)) == prefix
    assert frame.end_text == end_text
    assert frame.end_ids == ({target.tokenizer.eos_token_id} if has_end_token else set())


@pytest.mark.parametrize("template", ["fixed text", "{{ messages[0]['content'] | upper }}", "{{ messages[0]['content'] }}"])
def test_a_template_that_does_not_frame_the_text_is_refused(with_template, template):
    with pytest.raises(InputError, match="chat template"):
        find_user_frame(with_template(template), 10)


def test_a_turn_may_end_by_a_token_that_the_tokenizers_config_does_not_name_as_special(with_template):
    target = with_template(
        "{% for m in messages %}{{ '<|user|>' + m['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if not add_generation_prompt %}{{ '<|im_end|>' }}{% endif %}"  # as Phi-3's
    )
    target.tokenizer.add_tokens([AddedToken("<|user|>", special=True), AddedToken("<|end|>", special=True)])
    user, end = (target.tokenizer.convert_tokens_to_ids(token) for token in ("<|user|>", "<|end|>"))
    assert not {user, end} & set(target.tokenizer.all_special_ids)
    frame = find_user_frame(target, 10)
    assert (frame.prefix_ids, frame.end_ids) == ((user,), {end})
    hello = target.tokenizer("Hello", add_special_tokens=False)["input_ids"]
    assert read_turn(target, frame, [*hello, end]) == "Hello"
    assert read_turn(target, frame, [*hello, user, end]) is None


def test_turns_longer_than_the_context_are_refused(byte_target):
    with pytest.raises(InputError, match=r"prompts\.max_prompt_tokens"):
        find_user_frame(byte_target, 160)


def test_a_template_that_ends_a_turn_with_plain_text_works_too(with_template, monkeypatch):
    target = with_template(LLAMA_2)
    script = target.tokenizer("What is it? [/INST]", add_special_tokens=False)["input_ids"]
    start = len(find_user_frame(target, 100).prefix_ids)
    monkeypatch.setattr(
        "distill.generation.continuation.TargetSource.draw",
        lambda self, slots, rng: [[script[len(each.tokens) - start]] for each in slots],
    )
    prompts, _ = self_seed(target, CONFIG.model_copy(update={"num_prompts": 1}), batch_size=1, seed=0)
    assert prompts[0].turns == ("What is it?",)


# --- the choice ---------------------------------------------------------------------------------------------------


def test_as_many_distinct_prompts_as_asked_for_by_seed_and_number_alone(byte_target):
    seeded = prompts, dropped = self_seed(byte_target, CONFIG, batch_size=8, seed=0)
    assert len({prompt.user_text for prompt in prompts}) == 6
    assert all(len(prompt.user_text) >= 8 and prompt.category == "seeded" for prompt in prompts)
    assert set(dropped) <= {UNUSABLE, TOO_SHORT}
    assert dropped[UNUSABLE] > 0
    assert not any(marker in prompt.user_text for prompt in prompts for marker in ("<|im_start|>", "<|im_end|>"))
    one = CONFIG.model_copy(update={"num_prompts": 1})
    assert self_seed(byte_target, one, batch_size=8, seed=1)[0] != prompts[:1]
    other = Writer(byte_target, CONFIG, batch_size=8, seed=0)

    def with_the_other_rank(turns):
        return [*turns, *other.write([number + 1 for number, _ in turns])]

    assert self_seed(byte_target, CONFIG, batch_size=8, seed=0, num_processes=2, exchange=with_the_other_rank) == seeded


def test_hardly_any_usable_turn_is_reported(byte_target, monkeypatch):
    monkeypatch.setattr("distill.generation.continuation.TargetSource.draw", lambda self, slots, rng: [[0]] * len(slots))
    with pytest.raises(InputError, match=r"prompts\.max_prompt_tokens"):
        self_seed(byte_target, CONFIG.model_copy(update={"max_prompt_tokens": 3}), batch_size=64, seed=0)


def test_prompts_carry_their_kind_and_near_duplicates_are_dropped(byte_target, monkeypatch):
    turns = [
        (0, "Write a poem about the sea and a small boat"),
        (1, "write a POEM, about the sea and a small ship"),
        (2, None),
        (3, "Write a poem about mountains, and do not mention the sea or a boat"),
        (4, "hello there"),
        (5, "Hello  there"),
        (6, "too few words"),  # to be near to another
    ]
    config = STEERED.model_copy(update={"num_prompts": 4})
    monkeypatch.setattr(Writer, "write", lambda *_: turns)
    monkeypatch.setattr(self_seeding, "lead", lambda *of: (f"kind {of[-1]}", ""))
    prompts, dropped = self_seed(byte_target, config, batch_size=8, seed=0)
    assert [(each.prompt_id, each.category) for each in prompts] == [(f"self-{n}", f"kind {n}") for n in (0, 3, 4, 6)]
    assert dropped == {NEAR_DUPLICATE: 1, UNUSABLE: 1, DUPLICATE: 1}


# --- kinds --------------------------------------------------------------------------------------------------------


def test_kinds_are_drawn_by_weight_and_from_seed_and_number_alone():
    led = [lead(STEERED, 0, number) for number in range(2000)]
    counts = Counter(kind for kind, _ in led)
    assert set(counts) == set(KINDS)
    assert all(abs(counts[kind] / 2000 - weight / 4) < 0.04 for kind, weight in KINDS.items())
    turned = STEERED.model_copy(update={"kinds": dict(reversed(KINDS.items()))})
    assert led == [lead(turned, 0, number) for number in range(2000)]
    assert led != [lead(STEERED, 1, number) for number in range(2000)]


def test_every_kind_has_seeds_and_every_slot_words():
    seeds = parse_yaml(SEEDS.read_text(), "seeds")
    assert {"free", *seeds["openings"]} == set(get_args(PromptKind))
    found = {slot for each in seeds["openings"].values() for text in each for slot in re.findall(r"{(\w+)}", text)}
    assert found == {*seeds["slots"], "number"}
    for kind in get_args(PromptKind):
        assert all("{" not in lead(PromptsConfig(kinds={kind: 1.0}), 0, number)[1] for number in range(200))


def test_turns_begin_with_their_opening_and_go_on_whatever_the_batch(byte_target):
    written = Writer(byte_target, STEERED, batch_size=8, seed=0).write(range(32))
    assert [number for number, _ in written] == list(range(32))
    found = {number: said for number, said in written if said is not None}
    assert len({lead(STEERED, 0, number)[1] for number in found}) > 2
    for number, said in found.items():
        opening = lead(STEERED, 0, number)[1].strip()
        assert said.startswith(opening)
        assert len(said) > len(opening)
    assert Writer(byte_target, STEERED, batch_size=5, seed=0).write(range(32)) == written
