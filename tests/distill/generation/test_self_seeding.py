"""Self-seeding: taking any chat template apart, and turns that depend on nothing but seed and number."""

import copy
from dataclasses import replace

import pytest
from tokenizers import AddedToken

from configs.runtime.errors import InputError
from configs.schema.data import PromptsConfig
from distill.generation.prompts import DUPLICATE
from distill.generation.self_seeding import TOO_SHORT, UNUSABLE, Writer, find_user_frame, read_turn, self_seed

LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' }}{% endif %}{% endfor %}"
)
GEMMA = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
WITH_SYSTEM = "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}" + GEMMA
CONFIG = PromptsConfig(num_prompts=6, max_prompt_tokens=100, top_p=1.0, category="seeded")


@pytest.fixture
def with_template(byte_target):
    def make(template):
        tokenizer = copy.deepcopy(byte_target.tokenizer)
        tokenizer.chat_template = template
        return replace(byte_target, tokenizer=tokenizer)

    return make


def test_a_template_is_taken_apart_around_the_users_text(with_template):
    target = with_template(WITH_SYSTEM)
    frame = find_user_frame(target, 10)
    prefix = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"
    assert target.tokenizer.decode(list(frame.prefix_ids)) == prefix
    assert frame.end_ids == {target.tokenizer.eos_token_id}
    with pytest.raises(InputError, match=r"prompts\.max_prompt_tokens"):
        find_user_frame(target, 160)


@pytest.mark.parametrize(
    "template", ["fixed text", "{{ messages[0]['content'] | upper }}", "{{ messages[0]['content'] }}", LLAMA_2]
)
def test_a_template_that_does_not_frame_the_text_is_refused(with_template, template):
    with pytest.raises(InputError, match="chat template"):
        find_user_frame(with_template(template), 10)


def test_a_turn_may_end_by_a_token_that_the_tokenizers_config_does_not_name_as_special(with_template, tiny_llama):
    target = with_template(
        "{% for m in messages %}{{ '<|user|>' + m['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if not add_generation_prompt %}{{ '<|im_end|>' }}{% endif %}"  # as Phi-3's
    )
    target.tokenizer.add_tokens([AddedToken("<|user|>", special=True), AddedToken("<|end|>", special=True)])
    target = replace(target, model=tiny_llama(vocab_size=400))
    user, end = (target.tokenizer.convert_tokens_to_ids(token) for token in ("<|user|>", "<|end|>"))
    frame = find_user_frame(target, 10)
    assert (frame.prefix_ids, frame.end_ids) == ((user,), {end})
    hello = target.tokenizer("Hello", add_special_tokens=False)["input_ids"]
    assert read_turn(target, frame, [*hello, end]) == "Hello"
    assert read_turn(target, frame, [*hello, user, end]) is None


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


def test_turns_said_before_are_dropped_and_counted_and_a_prompt_is_named_by_its_number(byte_target, monkeypatch):
    turns = [(0, "Write a poem"), (1, None), (2, "write a  POEM"), (3, "Hello there"), (4, "Hi")]
    monkeypatch.setattr(Writer, "write", lambda *_: turns)
    prompts, dropped = self_seed(byte_target, CONFIG.model_copy(update={"num_prompts": 2}), batch_size=8, seed=0)
    assert [each.prompt_id for each in prompts] == ["self-0", "self-3"]
    assert dropped == {UNUSABLE: 1, DUPLICATE: 1}
