"""Sides take turns in a fair order; ratios are of sums and paired by case."""

from functools import partial

import pytest

from configs.schema.target import TargetConfig
from distill.dataset.conversations import Conversation
from heads.frozen.loading import load_target
from scripts.lab.bench import turns as turns_module
from scripts.lab.bench.turns import Turn, after_messages, in_chat_template, in_long_chat, speed_ratio, take_turns


def test_sides_are_timed_one_after_another_and_every_second_time_in_reverse(monkeypatch):
    clock, calls = [0.0], []
    monkeypatch.setattr(turns_module.time, "perf_counter", lambda: clock[0])

    def side(name, case, repeat):
        calls.append((name, case, repeat))
        clock[0] += case + repeat
        return name

    sides = {name: partial(side, name) for name in "ab"}
    turns = take_turns(sides, [10, 20], 2, description="testing")
    assert calls == [
        *(("a", 10, 0), ("b", 10, 0)),  # untimed, to warm up
        *(("a", 10, 0), ("b", 10, 0)),
        *(("b", 10, 1), ("a", 10, 1)),
        *(("b", 20, 0), ("a", 20, 0)),
        *(("a", 20, 1), ("b", 20, 1)),
    ]
    assert turns == {name: [[Turn(name, 10), Turn(name, 11)], [Turn(name, 20), Turn(name, 21)]] for name in "ab"}


def test_a_speed_ratio_is_one_of_amounts_by_seconds_summed_over_everything():
    ours = [[Turn(10, 1.0), Turn(10, 1.0)], [Turn(30, 8.0), Turn(30, 6.0)]]
    theirs = [[Turn(10, 2.0), Turn(10, 2.0)], [Turn(20, 8.0), Turn(20, 8.0)]]
    interval = speed_ratio(ours, theirs, float, samples=200)
    assert interval.point == pytest.approx((80 / 16) / (60 / 20))
    assert interval.low <= interval.point <= interval.high
    hard = [1.0, 5.0, 30.0, 2.0, 11.0]  # what is hard for both sides cancels
    interval = speed_ratio([[Turn(1, each)] for each in hard], [[Turn(1, 1.5 * each)] for each in hard], float, samples=200)
    assert (interval.point, interval.low, interval.high) == pytest.approx((1.5, 1.5, 1.5))


def test_a_prompt_stands_again_under_another_system_message_and_at_the_end_of_a_long_chat(tiny_run):
    target = load_target(TargetConfig(name=str(tiny_run / "target"), dtype="float32", device="cpu"))

    def row(number, said, answer):
        messages = ({"role": "user", "content": said}, {"role": "assistant", "content": answer})
        prompt, whole = target.encode_chat(messages[:1]), target.encode_chat(messages, answer_follows=False)
        return Conversation(
            prompt_id=str(number),
            category="c",
            turn=0,
            messages=messages,
            prompt_ids=tuple(prompt),
            answer_ids=tuple(whole[len(prompt) :]),
            ended=True,
        )

    asked, *others = [row(number, f"w{number}", f"w{10 + number} w20") for number in range(6)]
    system = [{"role": "system", "content": "w5"}]
    assert after_messages(target, asked, system).tokens == tuple(target.encode_chat([*system, asked.messages[0]]))
    before = [message for other in others[:2] for message in other.messages]
    expected = tuple(target.encode_chat([*before, asked.messages[0]]))
    request = in_long_chat(target, asked, [asked, *others], len(expected) + 3)
    assert (request.prompt_id, request.tokens) == ("0/0", expected)
    template = "w7 {{ messages[0]['content'] }}"
    words = tuple(target.tokenizer("w7 w0", add_special_tokens=False)["input_ids"])
    assert in_chat_template(target, asked, template).tokens == words
