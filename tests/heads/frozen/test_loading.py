"""Loading a target: what a person may name by mistake ends in a sentence, and templates may refuse a conversation."""

import dataclasses
import logging
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from configs.runtime.errors import InputError
from configs.schema.target import TargetConfig
from heads.device import choose_device
from heads.frozen.loading import load_target
from heads.frozen.weights import recast
from tests.support import architectures

NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ messages[0]['content'] }}"
)


@pytest.fixture
def folder(tmp_path, tiny_run):
    """A model folder to be damaged."""
    return shutil.copytree(tiny_run / "target", tmp_path / "target")


def load(path):
    return load_target(TargetConfig(name=str(path), dtype="float32", device="cpu"))


def test_every_end_of_the_generation_config_ends_an_answer_beside_the_tokenizers(
    tiny_run, tmp_path, tiny_llama, tiny_tokenizer
):
    assert load(tiny_run / "target").eos_token_ids == (0, 1, 63)
    model = tiny_llama(dtype=torch.float32)
    model.generation_config.eos_token_id = [7, 8]
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    assert load(tmp_path).eos_token_ids == (1, 7, 8)


def test_a_chat_has_the_bos_of_its_template_alone(tiny_llama, as_target, tiny_tokenizer):
    text = tiny_tokenizer("w0")["input_ids"]
    assert text[0] == tiny_tokenizer.bos_token_id  # of every text that is no chat
    template = "{{ bos_token }} {{ messages[0]['content'] }}"
    tokenizer = tiny_tokenizer.__class__(
        tokenizer_object=tiny_tokenizer.backend_tokenizer, chat_template=template, bos_token=tiny_tokenizer.bos_token
    )
    target = dataclasses.replace(as_target(tiny_llama()), tokenizer=tokenizer)
    assert target.encode_chat([{"role": "user", "content": "w0"}]) == text


@pytest.mark.parametrize("absent", ["config.json", "model.safetensors", "tokenizer*"])
def test_a_folder_without_one_of_its_parts_is_named(folder, absent):
    for path in folder.glob(absent):
        path.unlink()
    with pytest.raises(InputError, match=r"target\.name"):
        load(folder)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize(("cut", "remedy"), [(lambda content: POINTER, "git lfs pull"), (lambda content: content[:300], "")])
def test_a_file_that_was_not_fetched_or_is_cut_off_is_named_with_what_to_do(folder, name, cut, remedy):
    (folder / name).write_bytes(cut((folder / name).read_bytes()))
    with pytest.raises(InputError, match=f"{folder / name}.*{remedy}"):
        load(folder)


def test_a_token_that_has_no_embedding_is_warned_of_and_refused_in_a_conversation(folder, caplog):
    target = load(folder)
    target.tokenizer.add_tokens([f"<new{number}>" for number in range(target.vocab_size)])
    target.tokenizer.save_pretrained(folder)
    without, beyond = target.tokenizer.convert_ids_to_tokens([target.vocab_size - 1, target.vocab_size])
    assert load(folder).encode_chat([{"role": "user", "content": without}])
    assert "embeddings" in caplog.text
    with pytest.raises(InputError, match=beyond):
        load(folder).encode_chat([{"role": "user", "content": beyond}])


def test_a_family_without_sdpa_is_loaded_with_eager_attention_and_says_so(tmp_path, tiny_tokenizer, caplog):
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    config = Gemma2Config(**small, num_attention_heads=4, num_key_value_heads=2, sliding_window=4)
    AutoModelForCausalLM.from_config(config, attn_implementation="eager").save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, "draftsmith"):
        assert load(tmp_path).model.config._attn_implementation == "eager"
    assert "Gemma2ForCausalLM has no sdpa" in caplog.text


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "glm4_moe"])
def test_logits_are_to_the_bit_those_of_the_model_as_transformers_loads_it(tmp_path, tiny_tokenizer, family, dtype):
    model = architectures.tiny_model(family)
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 5e5}
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    ids_1T = torch.arange(32).unsqueeze(0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation="sdpa").eval()
    ours = load_target(TargetConfig(name=str(tmp_path), dtype=dtype, device="cpu")).model
    for last in (31, 2_000, 8_191):
        asked = {"input_ids": ids_1T, "position_ids": ids_1T - 31 + last, "use_cache": False}
        with torch.no_grad():
            assert torch.equal(ours(**asked).logits, theirs(**asked).logits)


def test_a_recast_model_is_the_one_that_is_loaded_in_that_dtype(tmp_path):
    model = architectures.tiny_model("deepseek_v3")
    model.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="bfloat16")
    ours = recast(model, torch.bfloat16)
    for name, tensor in [*theirs.named_parameters(), *theirs.named_buffers()]:
        own = ours.get_buffer(name) if name in dict(ours.named_buffers()) else ours.get_parameter(name)
        assert own.dtype == tensor.dtype, name
        assert torch.equal(own, tensor), name


def test_a_model_that_changes_its_rotary_embedding_has_the_context_before_that(tmp_path, tiny_llama, tiny_tokenizer, caplog):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    rope = {"rope_type": "longrope", "rope_theta": 100.0, **factors}
    for name, parameters in (("changes", rope), ("stays", rope | {"short_factor": [2.0] * 4})):
        tiny_llama(rope_parameters=parameters).save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
    assert load(tmp_path / "stays").max_positions == 256
    assert "longrope" not in caplog.text
    assert load(tmp_path / "changes").max_positions == 32
    assert "texts end at 32 tokens" in caplog.text


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "embedded:other", "nowhere.gguf"])
def test_a_target_that_is_nowhere_is_named(name):
    with pytest.raises(InputError, match=rf"target\.name: .*{name}"):
        load(name)


@pytest.mark.parametrize(("asked", "device"), [("false", "cuda"), ("true", "cpu")])
def test_auto_is_the_gpu_unless_the_launcher_was_told_to_use_the_cpu(monkeypatch, asked, device):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", asked)
    assert choose_device("auto").type == device


@pytest.mark.parametrize(
    ("template", "words"),
    [(NO_SYSTEM, "no system role"), ("{% if messages[1] %}{{ 1 + 'w' }}{% endif %}w3", "unsupported operand")],
)
def test_a_conversation_that_the_template_refuses_is_the_users_mistake(tiny_llama, as_target, tiny_tokenizer, template, words):
    tokenizer = tiny_tokenizer.__class__(tokenizer_object=tiny_tokenizer.backend_tokenizer, chat_template=template)
    target = dataclasses.replace(as_target(tiny_llama()), tokenizer=tokenizer)
    user = {"role": "user", "content": "w3"}
    assert target.encode_chat([user]) == tokenizer("w3", add_special_tokens=False)["input_ids"]
    with pytest.raises(InputError, match=f"refuses a conversation of system, user: {words}"):
        target.encode_chat([{"role": "system", "content": "be kind"}, user])
