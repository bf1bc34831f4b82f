"""A target whose tokens are no text, from a folder without a tokenizer to its data."""

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

END = 11


@pytest.fixture
def codes(tmp_path, tiny_llama):
    """The config of a target of 12 tokens, of which 8 to 10 are classes and 11 ends an answer."""
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
    dropped = json.loads((tmp_path / "data" / "manifest.json").read_text())["counts"]["dropped"]
    assert len(made) == 60 - dropped.get("empty_answer", 0) >= 50
    assert not dropped.get("duplicate")
    assert all(row.prompt_ids == (8 + int(row.category),) for row in made)
    assert {len(row.answer_ids) for row in made if not row.ended} == {9}
    assert {row.answer_ids[-1] for row in made if row.ended} == {END}


def test_what_is_no_id_of_the_vocabulary_is_refused(codes):
    target = load_target(codes)
    assert target.encode_chat([{"role": "user", "content": "9 0 #4"}, {"role": "assistant", "content": "3 2"}]) == [9, 0, 3, 2]
    with pytest.raises(InputError, match="a prompt is numbers from 0 to 11"):
        target.encode_chat([{"role": "user", "content": "9 12"}])
    with pytest.raises(ValidationError, match="set chat_template to null"):
        TargetConfig(tokens="ids", chat_template="plain")
    with pytest.raises(InputError, match=r"set target\.tokens to ids"):
        load_target(codes.model_copy(update={"tokens": "text"}))
