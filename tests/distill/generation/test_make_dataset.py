"""The data set from end to end on a small target: what lies in the folder, and what is refused before any work."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.runtime.errors import InputError
from configs.schema.data import AnswersConfig, DataConfig, PromptsConfig
from configs.schema.evaluation import SuiteConfig
from distill.dataset.conversations import (
    check_held_out,
    check_written_for,
    is_written_by_target,
    open_conversations,
    read_conversations,
)
from distill.generation import make_dataset as making
from distill.generation.bad_rows import LeftOut
from distill.generation.make_dataset import make_dataset
from distill.generation.prompts import split_prompts
from distill.generation.sources import list_prompts
from eval.measure.suite import Turns, load_suite
from heads.frozen import processes
from heads.frozen.loading import load_target
from scripts.data import show_rows


@pytest.fixture
def config(tmp_path, byte_target_folder):
    path = tmp_path / "prompts.jsonl"
    rows = [{"question_id": n, "turns": [f"question {n % 38}"]} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig.model_validate(
        {
            "target": {"name": str(byte_target_folder), "dtype": "float32", "device": "cpu"},
            "prompts": {"source": "file", "path": str(path), "num_prompts": 40},
            "answers": {"max_new_tokens": 12, "batch_size": 8, "temperature": 1.0},
            "held_out_share": 0.2,
            "output": str(tmp_path / "out" / "data"),
        }
    )


def made(config, **changes):
    config = config.model_copy(update=changes)
    make_dataset(config)
    folder = Path(config.output)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_folder_holds_both_sides_and_a_manifest_that_counts_and_hashes_them(config, byte_target):
    files = made(config)
    assert set(files) == {"train.jsonl", "held_out.jsonl", "manifest.json", "run.json"}
    folder = Path(config.output)
    train, held_out = (read_conversations(folder / name) for name in ("train.jsonl", "held_out.jsonl"))
    manifest = json.loads(files["manifest.json"])
    counts = manifest["counts"]
    assert not {row.prompt_id for row in train} & {row.prompt_id for row in held_out}
    assert counts["train"]["conversations"] == len(train)
    assert counts["held_out"]["answer_tokens"] == sum(len(row.answer_ids) for row in held_out)
    assert counts["prompts"] == 40 == len(train) + len(held_out) + sum(counts["dropped"].values())
    assert counts["dropped"]["duplicate"] == 2
    assert manifest["sha256"] == {name: hashlib.sha256(files[name]).hexdigest() for name in ("train.jsonl", "held_out.jsonl")}
    assert check_written_for(folder / "train.jsonl", byte_target.identity) == []
    assert is_written_by_target(folder / "train.jsonl")


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
SHOWING_TOOLS = (
    "{% for t in tools or [] %}T{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}|{% endfor %}"
)


@pytest.mark.parametrize("written_by", ["target", "dataset"])
def test_tools_are_shown_to_the_target_and_kept_for_the_evaluation(config, tmp_path, written_by):
    (tmp_path / "tools.jinja").write_text(SHOWING_TOOLS)
    called, result = {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "rain"}
    end = [called, result, {"role": "user", "content": "so"}, {"role": "assistant", "content": "no"}]
    chats = [[{"role": "user", "content": f"hi {number}"}, *end] for number in range(12)]
    rows = [{"messages": chat} | ({"tools": TOOLS} if number % 2 else {}) for number, chat in enumerate(chats)]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = config.target.model_copy(update={"chat_template": str(tmp_path / "tools.jinja")})
    answers = config.answers.model_copy(update={"written_by": written_by})
    prompts = config.prompts.model_copy(update={"path": str(path)})
    files = made(config, target=target, answers=answers, prompts=prompts, held_out_share=0.5)
    loaded = load_target(target)
    kept = [read_conversations(Path(config.output) / name) for name in ("train.jsonl", "held_out.jsonl")]
    for row in [*kept[0], *kept[1]]:
        asked = row.messages[0]["content"]
        assert bool(row.tools) == bool(int(asked.split()[1]) % 2)
        prompt = loaded.tokenizer.decode(row.prompt_ids)
        assert prompt == f"{'Tweather' if row.tools else ''}{asked}|{'|rain|so|' if row.turn else ''}"
        assert ([row.turn, row.messages[-1]["content"]] == [1, "no"]) == (written_by == "dataset" and row.turn == 1)
        if row.turn or written_by == "dataset":
            assert row.messages[1]["tool_calls"] == [{**CALL, "function": {"name": "weather", "arguments": {}}}]
    assert sum(len(row.spans) for row in kept[0]) == 2 * json.loads(files["manifest.json"])["counts"]["train"]["prompts"]
    assert json.loads(files["manifest.json"])["answers_written_by"] == written_by
    assert is_written_by_target(Path(config.output) / "train.jsonl") == (written_by == "target")
    suite = load_suite(SuiteConfig(path=str(Path(config.output) / "held_out.jsonl")))
    assert [request.tokens for request in Turns(loaded, suite.prompts).first] == [row.prompt_ids for row in kept[1]]


def test_yesterdays_answers_are_gone_on_with_where_the_template_writes_the_date(config, byte_target, monkeypatch, tmp_path):
    split, prints = split_prompts(list_prompts(config.prompts, LeftOut()), 0.2), set()
    for day in ("28 Nov", "29 Nov"):
        monkeypatch.setattr(byte_target.tokenizer, "chat_template", day + "{{ messages[0].content }}")
        prints.add(making.answer_job(config, byte_target, split, tmp_path).fingerprint)
    assert len(prints) == 1


def test_rows_that_are_no_prompts_are_counted_in_the_manifest_and_a_data_sets_own_answers_are_whole(config, tmp_path, capsys):
    chats = [[{"role": "user", "content": f"hi {n}"}, {"role": "assistant", "content": "so " * 44}] for n in range(12)]
    rows = [{"messages": chat} for chat in [*chats, [], [{"role": "system", "content": "x"}], chats[0][:1] * 60]]
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    policies = {"path": str(path), "on_bad_row": "skip", "on_too_long": "skip"}
    answers = AnswersConfig(written_by="dataset")
    files = made(config, prompts=config.prompts.model_copy(update=policies), answers=answers, held_out_share=0.5)
    counts = json.loads(files["manifest.json"])["counts"]
    assert counts["dropped"] == {"empty": 1, "no_question": 1, "too_long": 1}
    assert (counts["prompts"], counts["train"]["cut_off"] + counts["held_out"]["cut_off"]) == (12, 0)
    show_rows(config, 1)
    shown = capsys.readouterr().out
    assert shown.count("[[so so") == shown.count("<|im_end|>]]") == 1


def test_a_turn_that_chats_of_both_sides_begin_with_is_trained_on_alone(config, tmp_path):
    """More than ten chats open alike, which is taken for a template: the split then goes by all that each says."""
    hi, hello = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}
    path, chats = (
        tmp_path / "chats.jsonl",
        [[hi, hello, {"role": "user", "content": f"and {number}"}, hello] for number in range(40)],
    )
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    answers = config.answers.model_copy(update={"written_by": "dataset"})
    prompts = config.prompts.model_copy(update={"path": str(path)})
    counts = json.loads(made(config, answers=answers, prompts=prompts)["manifest.json"])["counts"]
    train, held_out = (open_conversations(Path(config.output) / name) for name in ("train.jsonl", "held_out.jsonl"))
    check_held_out(train, held_out)
    assert {row.turn for row in held_out} == {1}
    assert counts["held_out"]["also_in_train"] == len(held_out)
    assert counts["train"]["answers"] == 2 * len(train)


def test_self_seeded_prompts_survive_an_interruption(config, monkeypatch):
    own = PromptsConfig(num_prompts=12, max_prompt_tokens=90, top_p=1.0)
    config = config.model_copy(update={"prompts": own})
    monkeypatch.setattr(making.AnswerJob, "work", lambda *args, **kwargs: pytest.fail("stopped"))
    with pytest.raises(pytest.fail.Exception):
        make_dataset(config)
    monkeypatch.undo()
    monkeypatch.setattr(making, "self_seed", lambda *args, **kwargs: pytest.fail("written twice"))
    assert json.loads(made(config)["manifest.json"])["counts"]["prompts"] == 12


def test_answers_of_other_settings_are_not_taken_for_those_asked_for(config, monkeypatch):
    monkeypatch.setattr(making.AnswerJob, "collect", lambda job: pytest.fail("stopped"))
    with pytest.raises(pytest.fail.Exception):
        make_dataset(config)
    monkeypatch.undo()
    greedy = config.answers.model_copy(update={"temperature": 0.0})
    files = made(config, answers=greedy)
    assert files["train.jsonl"] == made(config, answers=greedy)["train.jsonl"]


def test_an_output_that_is_a_file_or_holds_anything_else_is_refused_before_the_target_is_loaded(config, tmp_path, monkeypatch):
    monkeypatch.setattr(making, "load_target", lambda config: pytest.fail("loaded"))
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder/.hidden"):
        (tmp_path / name).write_text("mine")
    for output in ("file", "file/data", "folder"):
        with pytest.raises(InputError, match=r"file|hidden"):
            make_dataset(config.model_copy(update={"output": str(tmp_path / output)}))
    assert (tmp_path / "folder" / ".hidden").read_text() == "mine"


def test_a_side_left_without_answers_is_refused_and_nothing_is_put_in_place(config, monkeypatch):
    nothing = making.Answered(rows_of=lambda prompt: [], dropped={"empty_answer": 38})
    monkeypatch.setattr(making.AnswerJob, "collect", lambda job: nothing)
    with pytest.raises(InputError, match="no answer is left to any train prompt"):
        make_dataset(config)
    assert not (Path(config.output) / "manifest.json").exists()


def test_processes_that_do_not_know_of_one_another_are_refused(config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(processes, "PartialState", lambda cpu, timeout: SimpleNamespace(num_processes=1))
    with pytest.raises(RuntimeError, match="2 processes"):
        make_dataset(config)
