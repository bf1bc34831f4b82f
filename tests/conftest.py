"""Tiny real models for every test: built from a config, random, in float64 so that equality of outputs is a fair demand."""

import json
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads only wait for each other

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from configs.runtime import redaction
from configs.schema.target import TargetConfig
from heads.artifact import save_draft_lm
from heads.frozen.identity import TargetIdentity, hash_chat_template, hash_tokenizer
from heads.frozen.loading import Target, load_target
from heads.metadata import Metadata

settings.register_profile("suite", deadline=None)  # a busy machine is no failure
settings.load_profile("suite")

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
SPECIAL = ["<pad>", "<end>", "<user>", "<assistant>", "<system>"]
BOS = "<bos>"  # the last id
ENDS = [1, 0, 63]  # what ends an answer of the model on disk, by its generation config: `<end>`, `<pad>`, `<bos>`


def pytest_collection_modifyitems(items):
    """Begin with the tests that start processes, which take longest: at the end one worker would be left with them."""
    items.sort(key=lambda item: not item.nodeid.startswith(("tests/train/", "tests/faults/", "tests/scripts/")))


@pytest.fixture(autouse=True)
def _no_key_of_another_test(monkeypatch):
    """Forget the keys that other tests had masked: `hide` is for the rest of a process."""
    monkeypatch.setattr(redaction, "_hidden", set())


def make_tokenizer():
    """Return a word-level tokenizer of 64 tokens, w0 to w57 and the special ones, with a chat template.

    It puts a `<bos>` before every text that it is not told to leave alone, as those of Llama, Gemma and Mistral do.
    """
    words = {word: index for index, word in enumerate([*SPECIAL, *(f"w{n}" for n in range(58)), BOS])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, words[BOS])])
    tokenizer.add_special_tokens([*SPECIAL, BOS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=TEMPLATE,
        bos_token=BOS,
        eos_token="<end>",
        pad_token="<pad>",
        unk_token="<pad>",
    )


def make_llama(seed=0, vocab_size=64, layers=2, dtype=torch.float64, spread=6.0, **settings):
    """Return a random Llama; the same seed gives the same weights."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=settings.pop("hidden_size", 32),
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=settings.pop("max_position_embeddings", 256),
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=settings.pop("tie_word_embeddings", False),
        **settings,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(dtype).eval()
    with torch.no_grad():  # the default initialisation is so flat that every argmax would be a near tie
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(spread)
    return model


@pytest.fixture(scope="session")
def tiny_tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_llama():
    return make_llama


@pytest.fixture(scope="session")
def as_target(tiny_tokenizer):
    """A function that makes a target of any causal LM."""

    def make(model, eos=(), name="tiny"):
        identity = TargetIdentity(
            name=name,
            revision=None,
            weights_sha256="0" * 64,
            tokenizer_sha256=hash_tokenizer(tiny_tokenizer),
            chat_template_sha256=hash_chat_template(tiny_tokenizer),
        )
        return Target(model=model, tokenizer=tiny_tokenizer, identity=identity, eos_token_ids=tuple(eos))

    return make


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory, tiny_llama, tiny_tokenizer):
    """A folder with `target/`, an `artifact/` made for it, and `suite.jsonl`, 17 prompts in two categories; only for reading.

    To be loaded as a person's are, in float32. The draft is the target with some noise, so that it is often right.
    """
    folder = tmp_path_factory.mktemp("run")
    model = tiny_llama(seed=1, dtype=torch.float32)
    model.generation_config.eos_token_id = ENDS
    model.save_pretrained(folder / "target")
    tiny_tokenizer.save_pretrained(folder / "target")
    target = load_target(TargetConfig(name=str(folder / "target"), dtype="float32", device="cpu"))
    draft = tiny_llama(seed=1, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.15 * parameter.std() * torch.randn_like(parameter))
    metadata = Metadata(
        kind="draft_lm",
        target=target.identity.to_dict(),
        draft_vocab_size=64,
        num_speculative_tokens=3,
        training={},
        provenance={},
    )
    save_draft_lm(folder / "artifact", draft, tiny_tokenizer, metadata)
    prompts = [
        {"question_id": f"q{number}", "category": ("even", "odd")[number % 2], "turns": [f"w{number} w{2 * number} w7"]}
        for number in range(17)
    ]
    (folder / "suite.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder
