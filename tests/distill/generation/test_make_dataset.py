"""The data set from end to end on a small target: what lies in the folder, and what is refused before any work."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from configs.runtime.errors import InputError
from configs.schema.data import DataConfig, PromptsConfig, shares_of
from configs.schema.evaluation import SuiteConfig
from distill.dataset.conversations import check_written_for, describe_data, is_written_by_target, read_conversations
from distill.generation import make_dataset as making
from distill.generation.make_dataset import make_dataset
from eval.measure.suite import Turns, load_suite
from heads.frozen import processes
from heads.frozen.loading import load_target


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


def test_few_held_out_prompts_are_said_with_what_to_do(config, caplog):
    files = made(config, held_out_share=0.1)
    count = json.loads(files["manifest.json"])["counts"]["held_out"]["prompts"]
    assert f"held out: {count} of 40 prompts (held_out_share is 0.1), too few to judge a draft by" in caplog.text


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
SHOWING_TOOLS = (
    "{% for t in tools or [] %}T{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}|{% endfor %}"
)


@pytest.mark.parametrize("written_by", ["target", "dataset"])
def test_tools_are_shown_to_the_target_and_kept_for_the_evaluation(config, tmp_path, written_by):
    (tmp_path / "tools.jinja").write_text(SHOWING_TOOLS)
    called, result = {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "rain"}
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"hi {number}"},
                called,
                result,
                {"role": "user", "content": "so"},
                {"role": "assistant", "content": "no"},
            ],
            **({"tools": TOOLS} if number % 2 else {}),
        }
        for number in range(12)
    ]
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
        assert loaded.tokenizer.decode(row.prompt_ids) == f"{'Tweather' if row.tools else ''}{asked}||rain|so|"
        assert (row.messages[-1]["content"] == "no") == (written_by == "dataset")
        assert row.messages[1]["tool_calls"] == [{**CALL, "function": {"name": "weather", "arguments": {}}}]
    assert json.loads(files["manifest.json"])["answers_written_by"] == written_by
    assert is_written_by_target(Path(config.output) / "train.jsonl") == (written_by == "target")
    suite = load_suite(SuiteConfig(path=str(Path(config.output) / "held_out.jsonl")))
    assert [request.tokens for request in Turns(loaded, suite.prompts).first] == [row.prompt_ids for row in kept[1]]


def test_the_prompts_of_all_sources_survive_an_interruption(config, tmp_path, monkeypatch):
    own = {"source": "self_seeded", "path": None, "max_prompt_tokens": 90, "top_p": 1.0}
    config = mixture(config, tmp_path, {"name": "own", **own}, {"name": "led", **own, "kinds": {"free": 1.0}}, num_prompts=12)
    monkeypatch.setattr(making.AnswerJob, "work", lambda *args, **kwargs: pytest.fail("stopped"))
    with pytest.raises(pytest.fail.Exception):
        make_dataset(config)
    monkeypatch.undo()
    monkeypatch.setattr(making, "self_seed", lambda *args, **kwargs: pytest.fail("written twice"))
    given = json.loads(made(config)["manifest.json"])["counts"]["sources"]
    assert {name: each["prompts"] for name, each in given.items()} == {"own": 6, "led": 6}


def mixture(config, tmp_path, *sources, num_prompts=24):
    """Return the config with two logs of requests, which share some prompts, and what `sources` say of each."""
    asked = {
        "first": [f"question number {n}" for n in range(30)],
        "log": [f"question number {n}" + "!" * (n % 40) for n in range(60)],
    }
    for name, texts in asked.items():
        rows = [{"model": "m", "messages": [{"role": "user", "content": text}]} for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = [{"source": "file", "path": str(tmp_path / f"{each['name']}.jsonl"), **each} for each in sources]
    prompts = PromptsConfig.model_validate({"num_prompts": num_prompts, "sources": both})
    return config.model_copy(update={"prompts": prompts})


def test_sources_give_their_shares_and_a_prompt_in_two_is_taken_once(config, tmp_path):
    sources = {"name": "first", "weight": 2}, {"name": "log", "max_tokens": 40, "max_new_tokens": 5, "category": "served"}
    config = mixture(config, tmp_path, *sources)
    manifest = json.loads(made(config)["manifest.json"])
    folder = Path(config.output)
    rows = [row for name in ("train.jsonl", "held_out.jsonl") for row in read_conversations(folder / name)]
    given = manifest["counts"]["sources"]
    assert {name: (each["share"], each["prompts"]) for name, each in given.items()} == {"first": (16, 16), "log": (8, 8)}
    assert given["log"]["dropped"]["duplicate"] == 1  # question 0; the others end in another number of marks
    assert given["log"]["dropped"]["outside_min_and_max_tokens"] > 0
    assert len({row.user_text for row in rows}) == len(rows)
    for row in rows:
        source, _, number = row.prompt_id.partition("/")
        assert row.category == {"first": "first", "log": "served"}[source]
        assert number
        if source == "log":
            assert len(row.prompt_ids) <= 40
            assert len(row.answer_ids) <= 5
    counts = [manifest["counts"][side] for side in ("train", "held_out")]
    assert {name: sum(each["by_source"].get(name, 0) for each in counts) for name in given} == {"first": 16, "log": 8}
    assert sum(each["by_kind"].get("served", 0) for each in counts) == 8
    assert describe_data(folder / "train.jsonl")["by_source"] == manifest["counts"]["train"]["by_source"]


@pytest.mark.parametrize(
    ("prompts", "complaint"),
    [
        ({"sources": []}, "at least one"),
        ({"sources": [{"name": "a"}, {"name": "a"}]}, "names that differ"),
        ({"sources": [{"name": "a"}], "temperature": 0.8}, "temperature goes into each of sources"),
        ({"sources": [{"name": "a", "min_tokens": 9, "max_tokens": 8}]}, "min_tokens must be at most max_tokens"),
        ({"kinds": {"poetry": 1.0}}, "free"),
        ({"source": "file", "path": "f", "kinds": {"free": 1.0}}, "only for source 'self_seeded'"),
    ],
)
def test_sources_and_kinds_that_cannot_be_are_refused(prompts, complaint):
    with pytest.raises(ValidationError, match=complaint):
        PromptsConfig.model_validate(prompts)


def test_shares_add_up_and_the_largest_remainders_get_the_rest():
    assert shares_of(10, [1, 1, 1]) == [4, 3, 3]
    assert shares_of(7, [0.5, 0.3, 0.2]) == [4, 2, 1]
    assert shares_of(1, [1, 3]) == [0, 1]


@pytest.mark.parametrize("name", ["notes.txt", ".hidden"])
def test_a_folder_with_anything_else_in_it_is_left_alone(config, name):
    folder = Path(config.output)
    folder.mkdir(parents=True)
    (folder / name).write_text("mine")
    with pytest.raises(InputError, match=f"holds {name}, which is not data made before"):
        make_dataset(config)
    assert (folder / name).read_text() == "mine"


def test_an_output_that_is_a_file_or_below_one_is_refused_before_the_target_is_loaded(config, tmp_path, monkeypatch):
    monkeypatch.setattr(making, "load_target", lambda config: pytest.fail("loaded"))
    (tmp_path / "file").write_text("")
    for output, complaint in (("file", "is a file"), ("file/data", "cannot be written")):
        with pytest.raises(InputError, match=complaint):
            make_dataset(config.model_copy(update={"output": str(tmp_path / output)}))


def test_a_side_left_without_answers_is_refused_and_nothing_is_put_in_place(config, monkeypatch):
    nothing = making.Answered(rows_of=lambda prompt: [], dropped={"empty_answer": 38})
    monkeypatch.setattr(making.AnswerJob, "collect", lambda job: nothing)
    with pytest.raises(InputError, match=r"no answer is left to any of the \d+ train prompts"):
        make_dataset(config)
    assert not (Path(config.output) / "manifest.json").exists()


def test_processes_that_do_not_know_of_one_another_are_refused(config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(processes, "PartialState", lambda cpu, timeout: SimpleNamespace(num_processes=1))
    with pytest.raises(RuntimeError, match="2 processes were launched, but accelerate sees 1"):
        make_dataset(config)
