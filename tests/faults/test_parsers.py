"""Whatever lies in a file that a user hands in, the answer is its content or one sentence: no traceback, no hang."""

import json
from contextlib import suppress
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.runtime.errors import InputError
from configs.runtime.files import inside
from configs.runtime.loading import load_config
from configs.schema.data import CacheConfig, DataConfig, PromptsConfig
from configs.schema.evaluation import EvalConfig
from configs.schema.training import DistillConfig, HeadsConfig
from distill.cache.reader import read_manifest as read_cache_manifest
from distill.dataset.conversations import check_written_for, is_written_by_target, read_conversations
from distill.generation.bad_rows import LeftOut
from distill.generation.sources import read_prompts
from heads.frozen.identity import TargetIdentity
from heads.metadata import read_metadata
from train.loop.checkpoints import read_manifest as read_checkpoint_manifest
from train.loop.telemetry import read_lines


def prompts_in(folder):
    return read_prompts(PromptsConfig(source="file", path=str(folder / "prompts.jsonl")), LeftOut())


FUZZ = settings(
    max_examples=60,
    deadline=timedelta(seconds=5),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ODD = st.sampled_from(
    [None, True, -1, 0, 1e308, float("nan"), float("inf"), 10**400, "", "..", "/etc/passwd", "\ud800", "\0", [], {}]
)
VALUES = st.recursive(
    ODD | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)

PROMPT = {"question_id": "q", "category": "c", "turns": ["hello"]}
CHAT = {"id": 1, "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]}
METRICS = {"step": 1, "seconds": 0.5, "tokens_per_target_step": 1.5}


def read_artifact(folder):
    TargetIdentity.from_dict(read_metadata(folder).target, "draftsmith.json")


def read_data(folder):
    identity = TargetIdentity.from_dict(json.loads((folder / "target.json").read_text()), "data")
    check_written_for(folder / "train.jsonl", identity)
    is_written_by_target(folder / "train.jsonl")


PARSERS = {  # the file, its content or where an undisturbed run has written one, and what reads it
    "cache manifest": ("manifest.json", "cache/manifest.json", read_cache_manifest),
    "draftsmith.json": ("draftsmith.json", "distill/artifact/draftsmith.json", read_artifact),
    "checkpoint manifest": ("checkpoint.json", "distill/checkpoints/step-00000012/checkpoint.json", read_checkpoint_manifest),
    "data manifest": ("manifest.json", "data/manifest.json", read_data),
    "prompts": ("prompts.jsonl", PROMPT, prompts_in),
    "chats": ("prompts.jsonl", CHAT, prompts_in),
    "conversations": ("train.jsonl", "data/train.jsonl", lambda folder: read_conversations(folder / "train.jsonl")),
    "metrics": ("metrics.jsonl", METRICS, lambda folder: read_lines(folder / "metrics.jsonl")),
}


@pytest.fixture(params=PARSERS)
def parsed(request, undisturbed, tmp_path):
    """A file's path, its content, and the function that reads it in its folder."""
    name, content, read = PARSERS[request.param]
    if isinstance(content, str):
        command, _, path = content.partition("/")
        text = (undisturbed[command] / path).read_text()
        content = json.loads(text.splitlines()[0] if path.endswith(".jsonl") else text)
    target = json.loads((undisturbed["data"] / "manifest.json").read_text())["target"]
    (tmp_path / "target.json").write_text(json.dumps(target))
    return tmp_path / name, content, read


@given(data=st.data())
@FUZZ
def test_a_file_changed_anywhere_is_content_or_a_sentence(parsed, data):
    path, content, read = parsed
    path.write_text(json.dumps(content))
    read(path.parent)
    if data.draw(st.booleans()):
        path.write_text(json.dumps(spoil(content, data)))
    else:
        whole = json.dumps(content).encode()
        start = data.draw(st.integers(0, len(whole)))
        end = data.draw(st.integers(start, len(whole)))
        path.write_bytes(whole[:start] + data.draw(st.binary(max_size=12)) + whole[end:])
    with suppress(InputError):
        read(path.parent)


@pytest.mark.parametrize("content", ["[" * 100_000, "9" * 5000, '{"a":' * 50_000, "\ufeff{}", "null", "", "\n\n"])
def test_hostile_files_are_a_sentence(parsed, content):
    path, _, read = parsed
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        read(path.parent)
    assert "\n" not in str(caught.value).strip()


@pytest.mark.parametrize("schema", [DistillConfig, HeadsConfig, DataConfig, CacheConfig, EvalConfig])
@given(data=st.data())
@FUZZ
def test_a_config_of_any_values_is_a_config_or_a_sentence(tmp_path, schema, data):
    fields = list(schema.model_fields)
    value = data.draw(st.dictionaries(st.sampled_from(fields) | st.text(max_size=6), VALUES, max_size=4))
    for field in data.draw(st.lists(st.sampled_from(fields), max_size=3)):
        section = schema.model_fields[field].annotation
        keys = list(getattr(section, "model_fields", {"x": None}))
        value[field] = data.draw(st.dictionaries(st.sampled_from(keys), VALUES, max_size=3))
    (tmp_path / "config.yaml").write_text(json.dumps(value))
    with suppress(InputError):
        load_config(schema, tmp_path / "config.yaml")


@pytest.mark.parametrize("name", ["..", "../x", "a/../../x", "/etc/passwd", "", ".", "link", "folder/x", "a\0b"])
def test_a_name_that_leads_out_of_its_folder_is_refused(tmp_path, name):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to("/etc/passwd")
    (tmp_path / "in" / "folder").symlink_to(tmp_path)
    with pytest.raises(InputError, match=r"manifest: expected the name of a file in .*, which leads out of it"):
        inside(tmp_path / "in", name, "manifest")
    assert inside(tmp_path / "in", "a/b.bin", "manifest") == tmp_path / "in" / "a" / "b.bin"


def spoil(value, data):
    """Return a JSON value with something else, or nothing, in one place."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 3)):
        key = data.draw(st.sampled_from(sorted(value)))
        if not data.draw(st.integers(0, 4)):
            return {name: kept for name, kept in value.items() if name != key}
        return value | {key: spoil(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.integers(0, 1)):
        place = data.draw(st.integers(0, len(value) - 1))
        return [*value[:place], spoil(value[place], data), *value[place + 1 :]]
    return data.draw(VALUES)
