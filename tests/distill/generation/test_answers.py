"""Answers: the target's own tokens, the same in any batch, on any number of processes and after any interruption."""

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.data import AnswersConfig
from distill.dataset.conversations import share_rows
from distill.generation.answers import (
    EMPTY,
    NO_ROOM,
    NOT_A_CONTINUATION,
    UNREACHED,
    AnswerJob,
    Dialogue,
    existing_answers,
)
from distill.generation.bad_rows import BadRow, LeftOut
from distill.generation.continuation import TargetSource
from distill.generation.prompts import Prompt, answer_of, encode_prompt, fit_prompts, said_since, turns_of
from distill.generation.row_forms import read_row
from distill.generation.sources import answered_prompts
from heads.inference.kv_cache import RowCache
from tests.support.writing import answer_prompts

SAMPLED = AnswersConfig(temperature=0.9, top_k=200, max_new_tokens=20, batch_size=4)
GREEDY = AnswersConfig(max_new_tokens=12, batch_size=4)


@pytest.fixture
def job(byte_target, make_prompts, tmp_path):
    def make(folder="out", config=SAMPLED, count=14, fingerprint="job"):
        settings = {"config": config, "seed": 5, "folder": tmp_path / folder, "fingerprint": fingerprint}
        return AnswerJob(target=byte_target, prompts=make_prompts(count), **settings)

    return make


def rows_in(job):
    answered = job.collect()
    return [row for prompt in job.prompts for row in answered.rows_of(prompt)]


def naive_greedy(target, ids, max_new_tokens):
    """Continue one prompt without a cache."""
    ids = list(ids)
    for produced in range(max_new_tokens):
        ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in target.eos_token_ids or len(ids) == target.max_positions:
            return ids[-produced - 1 :]
    return ids[-max_new_tokens:]


def test_greedy_answers_are_those_of_the_model_without_cache_batch_or_padding(byte_target, make_prompts):
    rows, dropped = answer_prompts(byte_target, make_prompts(6), GREEDY, seed=0)
    assert not dropped
    for row in rows:
        assert list(row.answer_ids) == naive_greedy(byte_target, row.prompt_ids, 12)
        assert row.prompt_ids == tuple(byte_target.encode_chat(row.messages[:-1]))
        assert row.ended == (row.answer_ids[-1] in byte_target.eos_token_ids)


@pytest.mark.parametrize("takes_rows", [True, False])
def test_the_next_turn_or_prompt_takes_the_place_of_an_answer_that_has_ended(byte_target, tmp_path, monkeypatch, takes_rows):
    monkeypatch.setattr(RowCache, "takes_rows", takes_rows)
    batches, starts, draw, start = [], [], TargetSource.draw, TargetSource.start
    monkeypatch.setattr(TargetSource, "draw", lambda self, rows, rng: batches.append(len(rows)) or draw(self, rows, rng))
    monkeypatch.setattr(TargetSource, "start", lambda self, rows: starts.append(len(rows)) or start(self, rows))
    prompts = [Prompt(prompt_id=f"p{n}", category="c", turns=("x" * (n % 5), "and?")[: 1 + n % 2]) for n in range(13)]
    config = SAMPLED.model_copy(update={"batch_size": 4})
    prompts = fit_prompts(byte_target, prompts, LeftOut())
    settings = {"folder": tmp_path, "fingerprint": "job"}
    job = AnswerJob(target=byte_target, prompts=prompts, config=config, seed=1, **settings)
    job.work(rank=0, num_processes=1)
    together, dropped = rows_in(job), job.collect().dropped
    if takes_rows:
        assert len(starts) == 1
        full = batches.index(next(size for size in batches if size < 4))
        assert sum(batches[full:]) <= 4 * 15  # only the last answers are written in fewer rows
    else:
        assert len(starts) > 2
    found = {row.prompt_id: [] for row in together}
    for row in together:
        found[row.prompt_id].append(row)
    for prompt in prompts:
        alone, _ = answer_prompts(byte_target, [prompt], config, seed=1)
        assert found.get(prompt.prompt_id, []) == alone
    assert len(together) + sum(dropped.values()) == sum(len(prompt.turns) for prompt in prompts)


def test_later_turns_follow_the_targets_own_answers_until_one_does_not_fit(byte_target):
    turns = ("one", "two", "x" * byte_target.max_positions, "four")
    rows, dropped = answer_prompts(byte_target, [Prompt(prompt_id="p", category="c", turns=turns)], GREEDY, seed=0)
    assert [row.turn for row in rows] == [0, 1]
    first, second = rows
    assert second.messages[:2] == first.messages
    assert second.messages[2] == {"role": "user", "content": "two"}
    assert second.prompt_ids == tuple(byte_target.encode_chat(second.messages[:-1]))
    assert dropped == {NO_ROOM: 1, UNREACHED: 1}


SYSTEM, HI, AND, CALL, RESULT = (
    {"role": "system", "content": "s"},
    {"role": "user", "content": "hi"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    {"role": "tool", "content": "4"},
)
WELL = {"role": "assistant", "content": "Well."}


def chat(*messages):
    return read_row({"messages": list(messages)}, "messages", "row 0", setting="prompts.field")


def test_every_turn_of_a_chat_is_a_prompt_with_what_was_said_and_answered_in_it():
    turns = turns_of(chat(SYSTEM, HI, CALL, RESULT, WELL, AND))
    assert [turn.messages for turn in turns] == [
        [SYSTEM, HI],
        [SYSTEM, HI, CALL, RESULT],
        [SYSTEM, HI, CALL, RESULT, WELL, AND],
    ]
    assert [answer_of(turn) for turn in turns] == [CALL, WELL, None]
    assert [said_since(turns, number) for number in range(3)] == [[SYSTEM, HI], [RESULT], [AND]]
    seen = [{"role": "user", "content": [{"type": "image", "path": name}]} for name in ("a", "b")]
    assert [turn.media for turn in turns_of(chat(seen[0], WELL, seen[1], WELL))] == [("a",), ("a", "b")]
    plain = turns_of(Prompt(prompt_id="p", category="c", turns=("one", "two")))
    assert [turn.turns for turn in plain] == [("one",), ("two",)]
    assert [len(turns_of(chat(*said))) for said in ([WELL, HI], [HI, WELL, WELL, AND], [HI, HI, WELL])] == [1, 2, 1]
    ran = turns_of(chat(HI, CALL, RESULT | {"role": "ipython"}, WELL))  # Llama's name for a tool's result
    assert [answer_of(turn) for turn in ran] == [CALL, WELL]


def taken(target, prompt, *answers):
    """Return the messages asked at each turn, and the turns without an answer, where these texts are the answers."""
    dialogue, asked = Dialogue(target, prompt, 100), []
    for answer in answers:
        if dialogue.ask() is None:
            break
        asked.append(list(dialogue._said))
        ids = target.tokenizer(answer, add_special_tokens=False)["input_ids"] if answer is not None else EMPTY
        dialogue.take(ids)
    assert dialogue.ask() is None
    return asked, dialogue.piece["dropped"]


def test_a_chat_goes_on_from_the_targets_answer_or_from_its_sources(byte_target):
    own, cut = {"role": "assistant", "content": "Own."}, "Ow"
    end = byte_target.tokenizer.eos_token
    first, last = [SYSTEM, HI], [own, AND]
    chats = chat(SYSTEM, HI, WELL, AND), chat(SYSTEM, HI, CALL, RESULT, WELL)
    assert taken(byte_target, chats[0], f"Own.{end}", "x") == ([first, first + last], {})
    for answer, dropped in ((cut, {}), (None, {EMPTY: 1})):
        assert taken(byte_target, chats[0], answer, "x") == ([first, [*first, WELL, AND]], dropped)
    assert taken(byte_target, chats[1], f"Own.{end}", "x") == ([first, [*first, CALL, RESULT]], {})
    plain = Prompt(prompt_id="p", category="c", turns=("hi", "and?", "so?"))
    assert taken(byte_target, plain, None) == ([[HI]], {EMPTY: 1, UNREACHED: 2})


def of_ids(ids, mask):
    return read_row({"input_ids": ids, "loss_mask": mask, "id": "p"}, "ids", "row 0", setting="prompts.field")


def test_a_row_of_ids_is_read_as_it_was_served(byte_target):
    prompt, left_out = of_ids([9, 3, 2, 8, 8, 4, 7], [0, 1, 1, 0, 0, 1, 0]), LeftOut()
    turns = existing_answers(byte_target, None, left_out).rows_of(prompt)
    assert [(turn.prompt_ids, turn.answer_ids) for turn in turns] == [((9,), (3, 2)), ((9, 3, 2, 8, 8), (4,))]
    (row,) = share_rows(turns)
    assert (row.spans, row.of_ids) == (((1, 3), (5, 6)), True)
    dialogue = Dialogue(byte_target, prompt, 100)
    assert dialogue.ask().prompt_ids == (9,)
    dialogue.take([5, byte_target.tokenizer.eos_token_id])
    assert dialogue.ask().prompt_ids == (9, 5, byte_target.tokenizer.eos_token_id, 8, 8)
    assert Prompt.below(prompt, "system") is prompt
    with pytest.raises(BadRow, match="vocabulary"):
        encode_prompt(byte_target, of_ids([byte_target.vocab_size, 3], [0, 1]))


def test_two_processes_write_what_one_writes_and_answers_of_another_job_are_written_again(job):
    alone, shared = job("alone"), job("shared")
    alone.work(rank=0, num_processes=1)
    for rank in (1, 0):
        shared.work(rank=rank, num_processes=2)
    assert rows_in(shared) == rows_in(alone)
    assert [row.prompt_id for row in rows_in(alone)] == [prompt.prompt_id for prompt in alone.prompts]
    with pytest.raises(RuntimeError, match="14 prompts"):
        job("alone", fingerprint="other").collect()


# --- answers that a data set brings ------------------------------------------------------------------------------


def prompt(answer, text="hi"):
    return Prompt(prompt_id="p", category="c", turns=(text,), answer=answer)


def one(target, answer, max_new_tokens=None, text="hi"):
    answered = existing_answers(target, max_new_tokens, left_out := LeftOut())
    rows = answered.rows_of(prompt(answer, text))
    return rows[0] if rows else answered.dropped + left_out.counts


def test_an_answer_is_what_the_target_would_have_had_to_write(byte_target):
    row = one(byte_target, "Well.")
    end = byte_target.tokenizer.eos_token_id
    assert row.prompt_ids == tuple(byte_target.encode_chat([{"role": "user", "content": "hi"}]))
    assert byte_target.tokenizer.decode(row.answer_ids[:-1]) == "Well."
    assert (row.answer_ids[-1], row.ended) == (end, True)  # the template's line break after it is left out
    assert [message["role"] for message in row.messages] == ["user", "assistant"]


def test_a_long_answer_is_cut_off_at_the_longest_length_and_at_the_context(byte_target):
    row = one(byte_target, "Well.", max_new_tokens=3)
    assert (byte_target.tokenizer.decode(row.answer_ids), row.ended) == ("Wel", False)
    row = one(byte_target, "x" * 200)
    assert len(row.prompt_ids) + len(row.answer_ids) == byte_target.max_positions
    assert not row.ended


def test_an_answer_that_is_empty_or_whose_template_rewrites_the_prompt_is_dropped_and_counted(byte_target, monkeypatch):
    assert one(byte_target, "") == {EMPTY: 1}
    template = "{% if add_generation_prompt %}open{% else %}closed{% endif %}"
    monkeypatch.setattr(byte_target.tokenizer, "chat_template", template)
    assert one(byte_target, "Well.") == {NOT_A_CONTINUATION: 1}
    with pytest.raises(InputError, match="on_bad_row"):
        answered_prompts([prompt("Well."), prompt(None)], LeftOut())
    left_out = LeftOut(on_bad_row="skip")
    assert answered_prompts([prompt("Well."), prompt(None)], left_out) == [prompt("Well.")]
    assert left_out.counts == {"no_answer": 1}


def test_an_answer_has_its_thinking_and_its_calls_as_the_template_writes_them(byte_target, monkeypatch):
    template = (
        "{% for message in messages %}{{ message.role }}:{% if message.reasoning_content %}<{{ message.reasoning_content }}>"
        "{% endif %}{{ message.content }}{% for call in message.tool_calls %}[{{ call.function.name }}]{% endfor %};"
        "{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    monkeypatch.setattr(byte_target.tokenizer, "chat_template", template)
    keys = {"reasoning_content": "hm", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    result = Prompt(
        prompt_id="p",
        category="c",
        turns=("4",),
        history=({"role": "user", "content": "hi"},),
        turn_keys={"role": "tool", "tool_call_id": "1"},
        answer="Well.",
        answer_keys=keys,
    )
    (row,) = existing_answers(byte_target, 100, LeftOut()).rows_of(result)  # the user's message and the tool's have one answer
    assert byte_target.tokenizer.decode(row.prompt_ids) == "user:hi;tool:4;assistant:"
    assert byte_target.tokenizer.decode(row.answer_ids) == "<hm>Well.[f];"
    assert row.user_text == result.user_text == "hi"
