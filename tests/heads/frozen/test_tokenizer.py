"""The chat template that the config names: it encodes, and is part of the identity; tokens that are ids."""

import json

import pytest
import torch
from pydantic import ValidationError

from configs.runtime.errors import InputError
from configs.schema.data import DataConfig
from configs.schema.target import TargetConfig
from distill.dataset.conversations import read_conversations
from distill.generation.make_dataset import make_dataset
from heads.frozen.loading import load_target
from heads.frozen.tokenizer import load_tokenizer, set_chat_template

END = 11


def target_of(folder, **settings):
    return load_target(TargetConfig(name=str(folder), device="cpu", **settings))


def user(text):
    return [{"role": "user", "content": text}]


def test_a_named_template_encodes_and_is_part_of_the_identity(tiny_run):
    own, plain = (target_of(tiny_run / "target", chat_template=name) for name in (None, "plain"))
    assert plain.encode_chat(user("hello there")) == plain.tokenizer("hello there").input_ids
    assert own.identity.differences(plain.identity) == ["chat template"]


@pytest.mark.parametrize("text", [None, "{% for %}"], ids=["no file", "no template"])
def test_what_is_no_template_is_refused(tmp_path, tiny_tokenizer, text):
    path = tmp_path / "mine.jinja"
    if text is not None:
        path.write_text(text)
    tokenizer = tiny_tokenizer.__class__(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    with pytest.raises(InputError, match=r"target\.chat_template"):
        set_chat_template(tokenizer, str(path))


THINKS = (
    "\n  {% if enable_thinking is defined and enable_thinking is false %}w1 {% endif %}"
    "{% for message in messages %}{% if depth %}{{ depth }} {% endif %}{{ message['content'] }} {% endfor %}\n"
)


def test_variables_of_the_template_are_rendered_and_part_of_the_identity(tiny_run, tmp_path, tiny_tokenizer):
    path = tmp_path / "thinks.jinja"
    path.write_text(THINKS)
    own, off, deep = (
        target_of(tiny_run / "target", chat_template=str(path), chat_template_kwargs=variables)
        for variables in (None, {"enable_thinking": False}, {"enable_thinking": True, "depth": "w3"})
    )
    assert [each.encode_chat(user("w8")) for each in (own, off, deep)] == [
        own.tokenizer(text, add_special_tokens=False).input_ids for text in ("w8", "w1 w8", "w3 w8")
    ]
    assert own.identity.differences(off.identity) == off.identity.differences(deep.identity) == ["chat template"]
    tiny_tokenizer.__class__(tokenizer_object=tiny_tokenizer.backend_tokenizer).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="chat_template_kwargs"):
        load_tokenizer(tmp_path, TargetConfig(name=str(tmp_path), chat_template_kwargs={"enable_thinking": False}))


@pytest.fixture
def codes(tmp_path, tiny_llama):
    """The config of a target of 12 tokens without a tokenizer, of which 8 to 10 are classes and 11 ends an answer."""
    model = tiny_llama(seed=3, vocab_size=12, spread=2.0, dtype=torch.float32)
    model.config.eos_token_id = model.generation_config.eos_token_id = END
    model.save_pretrained(tmp_path / "target")
    return TargetConfig(name=str(tmp_path / "target"), tokens="ids", dtype="float32", device="cpu")


def test_prompts_of_ids_are_answered_without_a_tokenizer(codes, tmp_path):
    rows = [{"prompt_ids": [8 + n % 3], "sample": n, "category": str(n % 3)} for n in range(60)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "target": codes,
        "prompts": {"source": "file", "path": str(tmp_path / "prompts.jsonl"), "num_prompts": 60},
        "answers": {"max_new_tokens": 9, "temperature": 1.0},
        "held_out_share": 0.3,
        "output": str(tmp_path / "data"),
    }
    make_dataset(DataConfig.model_validate(settings))
    made = [row for name in ("train", "held_out") for row in read_conversations(tmp_path / "data" / f"{name}.jsonl")]
    assert len(made) >= 50
    assert all(row.prompt_ids == (8 + int(row.category),) for row in made)
    assert {len(row.answer_ids) for row in made if not row.ended} == {9}
    assert {row.answer_ids[-1] for row in made if row.ended} == {END}


def test_what_is_no_id_of_the_vocabulary_is_refused(codes):
    target = load_target(codes)
    assert target.encode_chat([*user("9 0 #4"), {"role": "assistant", "content": "3 2"}]) == [9, 0, 3, 2]
    with pytest.raises(InputError, match="from 0 to 11"):
        target.encode_chat(user("9 12"))
    with pytest.raises(ValidationError, match="chat_template"):
        TargetConfig(tokens="ids", chat_template="plain")
    with pytest.raises(InputError, match=r"target\.tokens"):
        load_target(codes.model_copy(update={"tokens": "text"}))
