"""Loading a target: what a person may name by mistake ends in a sentence, and templates may refuse a conversation."""

import dataclasses
import shutil

import pytest

from configs.runtime.errors import InputError
from configs.schema.target import TargetConfig
from heads.target.loading import choose_device, load_target

NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ messages[0]['content'] }}"
)


@pytest.fixture
def folder(tmp_path, tiny_run):
    """A model folder to be damaged."""
    return shutil.copytree(tiny_run / "target", tmp_path / "target")


def load(path):
    return load_target(TargetConfig(name=str(path), dtype="float32", device="cpu"))


@pytest.mark.parametrize("damaged", ["config.json", "model.safetensors", "tokenizer*", "cut off"])
def test_a_folder_without_one_of_its_parts_is_named(folder, damaged):
    for path in folder.glob(damaged):
        path.unlink()
    if damaged == "cut off":
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(InputError, match="does not hold a causal LM and its tokenizer"):
        load(folder)


def test_a_file_that_is_no_gguf_is_named(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"not a model")
    with pytest.raises(InputError, match=r"model\.gguf does not hold a causal LM"):
        load(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "embedded:other", "nowhere.gguf"])
def test_a_target_that_is_nowhere_is_named(name):
    with pytest.raises(InputError, match=rf"target\.name: .*{name}"):
        load(name)


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(InputError, match=r"target\.device: 'abacus' cannot be used"):
        choose_device("abacus")


@pytest.mark.parametrize(("asked", "device"), [("false", "cuda"), ("true", "cpu")])
def test_auto_is_the_gpu_unless_the_launcher_was_told_to_use_the_cpu(monkeypatch, asked, device):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", asked)
    assert choose_device("auto").type == device


def test_a_conversation_that_the_template_refuses_is_the_users_mistake(tiny_llama, as_target, tiny_tokenizer):
    tokenizer = tiny_tokenizer.__class__(tokenizer_object=tiny_tokenizer.backend_tokenizer, chat_template=NO_SYSTEM)
    target = dataclasses.replace(as_target(tiny_llama()), tokenizer=tokenizer)
    user = {"role": "user", "content": "w3"}
    assert target.encode_chat([user]) == tokenizer("w3")["input_ids"]
    with pytest.raises(InputError, match="refuses a conversation of system, user: no system role"):
        target.encode_chat([{"role": "system", "content": "be kind"}, user])
