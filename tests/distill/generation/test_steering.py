"""Steered prompts: led to kinds by weight, by words of the target's own, and depending on nothing but seed and number."""

import re
from collections import Counter
from types import SimpleNamespace
from typing import get_args

import pytest

from configs.runtime.loading import parse_yaml
from configs.runtime.terminal import Tokens
from configs.schema.data import PromptKind, PromptsConfig
from configs.schema.target import TargetConfig
from distill.generation import self_seeding
from distill.generation.prompts import DUPLICATE
from distill.generation.self_seeding import NEAR_DUPLICATE, UNUSABLE, self_seed
from distill.generation.steering import SEEDS, Writer, plan_prompt
from heads.frozen.loading import load_target

KINDS = {"free": 1, "question": 2, "code": 1, "summarise": 1, "answer_from": 1, "dialogue": 2}
CONFIG = PromptsConfig(num_prompts=12, max_prompt_tokens=300, max_text_tokens=300, top_p=1.0, kinds=KINDS)
NUMBERS = range(40)


@pytest.fixture(scope="module")
def long_target(tmp_path_factory, tiny_llama, byte_tokenizer):
    """As `byte_target`, with a context of 2,048 bytes."""
    folder = tmp_path_factory.mktemp("long_target")
    byte_tokenizer.save_pretrained(folder)
    tiny_llama(vocab_size=len(byte_tokenizer), spread=2.0, max_position_embeddings=2048).save_pretrained(folder)
    return load_target(TargetConfig(name=str(folder), dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def written(long_target):
    return dict(Writer(long_target, CONFIG, Tokens(), batch_size=8, seed=0).write(NUMBERS))


def test_kinds_are_drawn_by_weight_and_from_seed_and_number_alone():
    plans = [plan_prompt(CONFIG, 0, "", number) for number in range(2000)]
    counts = Counter(plan.kind for plan in plans)
    assert set(counts) == set(KINDS)
    assert all(abs(counts[kind] / 2000 - weight / 8) < 0.04 for kind, weight in KINDS.items())
    assert plans == [
        plan_prompt(CONFIG.model_copy(update={"kinds": dict(reversed(KINDS.items()))}), 0, "", number) for number in range(2000)
    ]
    assert plans != [plan_prompt(CONFIG, 1, "", number) for number in range(2000)]
    assert plans != [plan_prompt(CONFIG, 0, "other", number) for number in range(2000)]


def test_every_kind_has_seeds_and_every_slot_words():
    seeds = parse_yaml(SEEDS.read_text(), "seeds")
    assert {"free", "dialogue", *seeds["openings"], *seeds["instructions"]} == set(get_args(PromptKind))
    lists = [*seeds["openings"].values(), *seeds["instructions"].values(), seeds["texts"]]
    assert {slot for each in lists for text in each for slot in re.findall(r"{(\w+)}", text)} == {*seeds["slots"], "number"}
    for kind in get_args(PromptKind):
        assert all("{" not in plan_prompt(PromptsConfig(kinds={kind: 1.0}), 0, "", number).opening for number in range(200))


def test_turns_begin_with_their_opening_and_hold_the_text_they_are_about(long_target, written):
    found = Counter()
    for number, turns in written.items():
        plan = plan_prompt(CONFIG, 0, "", number)
        if turns is None:
            continue
        found[plan.kind] += 1
        said = turns[0]
        if plan.text_request is None:
            assert said.startswith(plan.opening.strip())
            assert len(said) > len(plan.opening.strip())
        else:
            assert plan.opening in said
            assert len(said) > len(plan.opening) + 80
        assert ("\n\nQuestion:" in said) == (plan.kind == "answer_from")
        if plan.kind == "answer_from":
            assert "\n" not in said.rpartition("\n\nQuestion: ")[2]
        assert (len(turns) > 1) == (plan.kind == "dialogue")
        if plan.kind == "dialogue":
            assert turns[1].startswith(plan.follow_ups[0])
    assert set(found) == set(KINDS)


@pytest.mark.parametrize("parts", [[NUMBERS], [NUMBERS[1::2], NUMBERS[::2]]], ids=["one process", "two processes"])
def test_neither_the_batch_size_nor_the_processes_change_what_is_written(long_target, written, parts):
    writer = Writer(long_target, CONFIG, Tokens(), batch_size=5, seed=0)
    assert dict(turn for part in parts for turn in writer.write(part)) == written


def test_prompts_carry_their_kind_and_near_duplicates_are_dropped(long_target, monkeypatch):
    turns = [
        (0, ["Write a poem about the sea and a small boat"]),
        (1, ["write a POEM, about the sea and a small ship"]),
        (2, None),
        (3, ["Write a poem about mountains, and do not mention the sea or a boat", "Thanks!"]),
        (4, ["hello there"]),
        (5, ["Hello  there"]),
        (6, ["too few words"]),  # to be near to another
        (7, ["too few words"]),
    ]
    config = CONFIG.model_copy(update={"num_prompts": 4})
    monkeypatch.setattr(Writer, "write", lambda *_: turns)
    monkeypatch.setattr(self_seeding, "plan_prompt", lambda *of: SimpleNamespace(kind=f"kind {of[-1]}"))
    prompts, dropped = self_seed(long_target, config, batch_size=8, seed=0)
    assert [(each.prompt_id, each.category, len(each.turns)) for each in prompts] == [
        ("self-0", "kind 0", 1),
        ("self-3", "kind 3", 2),
        ("self-4", "kind 4", 1),
        ("self-6", "kind 6", 1),
    ]
    assert dropped == {NEAR_DUPLICATE: 1, UNUSABLE: 1, DUPLICATE: 1}
