"""What files and data sets give, and what is refused by its place."""

import gzip
import json
from collections import Counter

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from configs.runtime.errors import InputError
from configs.schema.data import PromptsConfig
from distill.generation.bad_rows import LeftOut
from distill.generation.prompts import Prompt
from distill.generation.sources import list_prompts, read_prompts, read_source

TABLE = [{"prompt": "one, \u2028two", "n": 1}, {"prompt": 'a "b"\n', "n": 2}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in TABLE)
CSV = 'prompt,n\n"one, \u2028two",1\n"a ""b""\n",2\n'
FILES = {
    "bom.jsonl": b"\xef\xbb\xbf" + LINES.encode(),
    "a.jsonl.gz": gzip.compress(LINES.encode()),
    "a.json": json.dumps(TABLE, indent=1).encode(),
    "lines.json": LINES.encode(),
    "a.csv.gz": gzip.compress(CSV.encode()),
    "a.tsv": CSV.replace(",n", "\tn").replace('",', '"\t').encode(),
    "a.parquet": lambda path: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TABLE), path),
}


def write(path, content):
    content(path) if callable(content) else path.write_bytes(content)
    return path


def rows_in(path):
    return [row for _, row in read_source(path, "prompt file")]


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name):
    assert rows_in(write(tmp_path / name, FILES[name])) == TABLE


def test_a_text_has_a_prompt_a_line_and_a_field_of_csv_may_be_long_or_empty(tmp_path):
    assert rows_in(write(tmp_path / "a.txt", b"One.\r\n\nTwo.\n")) == [{"prompt": "One."}, {"prompt": "Two."}]
    long = "word " * 300_000
    assert rows_in(write(tmp_path / "a.csv", f"prompt,id\n{long},\n".encode()))[0]["prompt"] == long


def test_a_folder_is_all_of_its_files_in_order(tmp_path):
    with pytest.raises(InputError, match="holds no file"):
        rows_in(tmp_path)
    (tmp_path / "b").mkdir()
    for name in ("b/2.txt", "1.txt", "notes.md"):
        write(tmp_path / name, name.encode())
    assert [row["prompt"] for row in rows_in(tmp_path)] == ["1.txt", "b/2.txt"]


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.jsonl", b"{", "line 1"),
        ("a.txt", b"a\n\xff", "line 2"),
        ("a.jsonl", b"\n", "is empty"),
        ("a.json", b"[1]", "entry 0"),
        ("a.json", b"[{]", "a.json"),
        ("a.csv", b"a,b\n1\n", "a.csv"),
        ("a.parquet", b"PAR1", "a.parquet"),
        ("a.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path, name, content, place):
    with pytest.raises(InputError, match=place):
        rows_in(write(tmp_path / name, content))


# --- prompts of files and data sets -------------------------------------------------------------------------------

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}


@pytest.fixture
def prompt_file(tmp_path):
    return lambda *rows: write(tmp_path / "prompts.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())


def read(path, left_out=None, **settings):
    return read_prompts(PromptsConfig(source="file", path=str(path), **settings), left_out or LeftOut())


def test_a_named_column_is_read_where_a_row_has_it_and_other_rows_by_their_keys(prompt_file):
    path = prompt_file({"asked": "one", "turns": ["not this"]}, {"messages": [{"role": "user", "content": "two"}]})
    assert [prompt.turns for prompt in read(path, field="asked")] == [("one",), ("two",)]
    with pytest.raises(InputError, match=r"prompts\.field"):
        read(path, field="told")


def test_a_prompt_without_an_id_is_named_by_its_content_and_two_of_one_id_are_refused(prompt_file):
    one, two, three = read(prompt_file({"turns": ["a"]}, {"turns": ["b"]}, {"turns": ["a"]}))
    assert one.prompt_id == three.prompt_id != two.prompt_id
    path = prompt_file({"question_id": "a", "turns": ["x"]}, {"question_id": "a", "turns": ["y"]})
    with pytest.raises(InputError, match=r"line 2: .*'a'.*line 1.*on_bad_row"):
        read(path)
    first, second = read(path, on_bad_row="skip")
    assert (first.prompt_id, second.turns, second.prompt_id == "a") == ("a", ("y",), False)


ODD = {
    b"{": "not_json",
    b"[1]": "not_json",
    '{"turns": ["é"]}'.encode("latin-1"): "not_utf8",
    b'{"asked": "x"}': "no_known_key",
    b'{"messages": []}': "empty",
    b'{"messages": [{"role": "system", "content": "x"}]}': "no_question",
    b'{"messages": [{"role": "assistant", "content": "x"}]}': "no_question",
    b'{"messages": [{"role": "user", "content": null}]}': "content",
    b'{"messages": [{"role": "laguna_s", "content": "x"}]}': "unknown_role",
    b'{"turns": [" "]}': "blank_turn",
    b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "{", "prefix": true}]}': "open_answer",
    b'{"request": {"messages": [{"role": "user", "content": "x"}], "continue_final_message": true}}': "open_answer",
}


def test_a_row_that_is_no_prompt_is_refused_by_its_place_or_left_out_and_counted(tmp_path, caplog):
    good = [b'{"turns": ["one"]}', b'{"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]}']
    path = write(tmp_path / "odd.jsonl", b"\n".join([good[0], *ODD, good[1], b""]))
    left_out = LeftOut(on_bad_row="skip", max_share=0.9)
    assert [each.turns for each in read(path, left_out)] == [("one",), ("y",)]
    assert left_out.counts == Counter(ODD.values())
    left_out.check(2)
    left_out.check(1)  # of the two one is taken
    assert "line 4" in caplog.text
    with pytest.raises(InputError, match="max_bad_share"):
        LeftOut(max_share=0.8, counts=left_out.counts).check(2)
    for row in ODD:
        with pytest.raises(InputError, match=r"line 2: .*on_bad_row"):
            read(write(tmp_path / "one.jsonl", good[0] + b"\n" + row))


def test_prompts_are_made_of_several_columns(prompt_file):
    path = prompt_file(*({"doc": {"text": f"Part {n}."}, "question": [f"Why {n}?"]} for n in range(3)))
    found = read(path, template="{doc[text]}\n\n{question[0]}")
    assert [prompt.turns for prompt in found] == [(f"Part {n}.\n\nWhy {n}?",) for n in range(3)]
    for wrong in ("{document}", "{question[3]}", "{question.text}", "{doc", "{}"):
        with pytest.raises(InputError, match=r"line 1: prompts\.template"):
            read(path, template=wrong)


def list_data_set(path, **more):
    return list_prompts(PromptsConfig(source="dataset", path=str(path), **more), LeftOut())


def test_a_folder_of_json_files_is_a_data_set(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    rows = "".join(json.dumps({"question": f"Why {n}?"}) + "\n" for n in range(4))
    (tmp_path / "data" / "train.jsonl").write_text(rows)
    prompts = list_data_set(tmp_path / "data", field="question", num_prompts=3, category="why")
    assert [(each.prompt_id, each.category, each.turns) for each in prompts] == [
        (f"row-{n}", "why", (f"Why {n}?",)) for n in range(3)
    ]


def test_a_saved_data_set_gives_its_chats_and_categories_or_says_what_it_has(tmp_path):
    rows = {"chat": [[SYSTEM, USER, ASSISTANT]], "turns": [["a", "b"]], "category": ["talk"], "blank": [""]}
    datasets.DatasetDict(train=datasets.Dataset.from_dict(rows)).save_to_disk(tmp_path / "saved")
    chat = list_data_set(tmp_path / "saved", field="chat")
    assert chat == [Prompt(prompt_id="row-0", category="talk", turns=("Hi",), history=(SYSTEM,))]
    assert list_data_set(tmp_path / "saved", field="turns")[0].turns == ("a", "b")
    for settings, key in (({"split": "test"}, "train"), ({"field": "asked"}, "chat"), ({"field": "blank"}, "row 0")):
        with pytest.raises(InputError, match=key):
            list_data_set(tmp_path / "saved", **settings)
    with pytest.raises(InputError, match="could not be loaded"):
        list_data_set(tmp_path / "nowhere")


def test_a_data_set_of_the_hub_is_that_of_its_revision(monkeypatch):
    asked = []

    def load_dataset(path, subset, *, split, revision):
        asked.append((path, subset, split, revision))
        return datasets.Dataset.from_dict({"text": ["a"], "question": ["Why?"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = list_data_set("owner/name", revision="abc", template="{text} {question}")
    assert [prompt.turns for prompt in found] == [("a Why?",)]
    assert asked == [("owner/name", None, "train", "abc")]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"source": "file"}, "path"),
        ({"source": "file", "path": "a", "revision": "abc"}, "revision"),
        ({"source": "file", "path": "a", "template": "{a}", "answer_field": "b"}, "template"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, key):
    with pytest.raises(ValidationError, match=key):
        PromptsConfig(**settings)
