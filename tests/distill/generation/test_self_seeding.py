"""Self-seeding: taking any chat template apart, and turns that depend on nothing but seed and number."""

import copy
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest
from tokenizers import AddedToken

from configs.runtime.errors import InputError
from configs.runtime.loading import parse_yaml
from configs.runtime.terminal import Tokens
from configs.schema.data import PromptKind, PromptsConfig
from configs.schema.target import TargetConfig
from distill.generation import self_seeding
from distill.generation.prompts import DUPLICATE
from distill.generation.self_seeding import NEAR_DUPLICATE, TOO_SHORT, UNUSABLE, Writer, self_seed
from distill.generation.steering import SEEDS, find_user_frame, plan_prompt, read_turn
from heads.frozen.loading import load_target

LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' }}{% endif %}{% endfor %}"
)
GEMMA = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
WITH_SYSTEM = "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}" + GEMMA
CONFIG = PromptsConfig(num_prompts=6, max_prompt_tokens=100, top_p=1.0, category="seeded")
KINDS = {"free": 1, "question": 2, "code": 1, "summarise": 1, "answer_from": 1}
STEERED = PromptsConfig(num_prompts=12, max_prompt_tokens=300, max_text_tokens=300, top_p=1.0, kinds=KINDS)
NUMBERS = range(64)


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
    other = Writer(byte_target, CONFIG, Tokens(), batch_size=8, seed=0)

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
    config = STEERED.model_copy(update={"num_prompts": 4, "max_prompt_tokens": 90})
    monkeypatch.setattr(Writer, "write", lambda *_: turns)
    monkeypatch.setattr(self_seeding, "plan_prompt", lambda *of: SimpleNamespace(kind=f"kind {of[-1]}"))
    prompts, dropped = self_seed(byte_target, config, batch_size=8, seed=0)
    assert [(each.prompt_id, each.category) for each in prompts] == [(f"self-{n}", f"kind {n}") for n in (0, 3, 4, 6)]
    assert dropped == {NEAR_DUPLICATE: 1, UNUSABLE: 1, DUPLICATE: 1}


# --- kinds --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_target(tmp_path_factory, tiny_llama, byte_tokenizer):
    """As `byte_target`, with a context of 2,048 bytes."""
    folder = tmp_path_factory.mktemp("long_target")
    byte_tokenizer.save_pretrained(folder)
    tiny_llama(vocab_size=len(byte_tokenizer), spread=2.0, max_position_embeddings=2048).save_pretrained(folder)
    return load_target(TargetConfig(name=str(folder), dtype="float32", device="cpu"))


def test_kinds_are_drawn_by_weight_and_from_seed_and_number_alone():
    plans = [plan_prompt(STEERED, 0, number) for number in range(2000)]
    counts = Counter(plan.kind for plan in plans)
    assert set(counts) == set(KINDS)
    assert all(abs(counts[kind] / 2000 - weight / 6) < 0.04 for kind, weight in KINDS.items())
    turned = STEERED.model_copy(update={"kinds": dict(reversed(KINDS.items()))})
    assert plans == [plan_prompt(turned, 0, number) for number in range(2000)]
    assert plans != [plan_prompt(STEERED, 1, number) for number in range(2000)]


def test_every_kind_has_seeds_and_every_slot_words():
    seeds = parse_yaml(SEEDS.read_text(), "seeds")
    assert {"free", *seeds["openings"], *seeds["instructions"]} == set(get_args(PromptKind))
    lists = [*seeds["openings"].values(), *seeds["instructions"].values(), seeds["texts"]]
    assert {slot for each in lists for text in each for slot in re.findall(r"{(\w+)}", text)} == {*seeds["slots"], "number"}
    for kind in get_args(PromptKind):
        assert all("{" not in plan_prompt(PromptsConfig(kinds={kind: 1.0}), 0, number).opening for number in range(200))


def test_turns_begin_with_their_opening_and_hold_the_text_they_are_about_in_any_batch_and_process(long_target):
    written = Writer(long_target, STEERED, Tokens(), batch_size=8, seed=0).write(NUMBERS)
    assert [number for number, _ in written] == list(NUMBERS)
    found = set()
    for number, said in written:
        plan = plan_prompt(STEERED, 0, number)
        if said is None:
            continue
        found.add(plan.kind)
        if plan.text_request is None:
            assert said.startswith(plan.opening.strip())
            assert len(said) > len(plan.opening.strip())
        else:
            assert plan.opening in said
            assert len(said) > len(plan.opening) + 80
        assert ("\n\nQuestion:" in said) == (plan.kind == "answer_from")
        if plan.kind == "answer_from":
            assert "\n" not in said.rpartition("\n\nQuestion: ")[2]
    assert found == set(KINDS)
    writer = Writer(long_target, STEERED, Tokens(), batch_size=5, seed=0)
    assert sorted(turn for part in (NUMBERS[1::2], NUMBERS[::2]) for turn in writer.write(part)) == written
