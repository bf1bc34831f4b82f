"""A small random target over single bytes, on disk and loaded, and prompts for it."""

from contextlib import ExitStack

import pytest
from accelerate import PartialState
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from configs.schema.target import TargetConfig
from distill.generation.prompts import Prompt
from heads.frozen.loading import load_target
from tests.support.fake_server import Api, serving

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def byte_tokenizer():
    """A tokenizer of one token a byte, so that it can say anything, with a ChatML template; it adds a BOS to texts."""
    vocab = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    bos = ("<|im_start|>", tokenizer.token_to_id("<|im_start|>"))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>", chat_template=CHATML
    )


@pytest.fixture(scope="session")
def byte_target_folder(tmp_path_factory, tiny_llama, byte_tokenizer):
    """A model folder: a two-layer Llama with a context of 160 bytes and nearly flat distributions, so that texts end now and
    then."""
    folder = tmp_path_factory.mktemp("byte_target")
    byte_tokenizer.save_pretrained(folder)
    model = tiny_llama(vocab_size=len(byte_tokenizer), spread=2.0, max_position_embeddings=160)
    model.generation_config.eos_token_id = [byte_tokenizer.eos_token_id, *byte_tokenizer.convert_tokens_to_ids(["Ā", "ā"])]
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def byte_target(byte_target_folder):
    """That folder, loaded as a target."""
    return load_target(TargetConfig(name=str(byte_target_folder), dtype="float32", device="cpu"))


@pytest.fixture(scope="session")
def make_prompts():
    """A function that gives so many different prompts of different lengths."""

    def make(count):
        return [
            Prompt(prompt_id=f"p{number}", category="test", turns=(f"question {number}" + "?" * (number % 7),))
            for number in range(count)
        ]

    return make


@pytest.fixture(autouse=True)
def fresh_process_state():
    """Leave no process state behind: accelerate keeps the first one for the life of the process."""
    yield
    PartialState._reset_state()


@pytest.fixture
def stack():
    """A stack of what is closed after the test."""
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def api(byte_target):
    """A running server of the byte target, with its `url`."""
    with serving(Api(byte_target)) as served:
        yield served
