"""`auto` in a recipe: what it comes to for targets of other sizes and kinds, and that nothing behind it sees the word."""

from functools import cache

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Qwen3MoeConfig

from configs.runtime.files import CHECKOUT
from configs.runtime.loading import load_config, read_values
from configs.schema.base import AUTO
from configs.schema.commands.planning import PlanDistillConfig, PlanHeadsConfig
from configs.schema.target import TargetConfig
from heads.families.eagle3 import default_taps
from heads.families.registry import FAMILIES
from heads.vocabulary import DraftVocabulary
from tests.support.caches import conversation
from train.plan.models import empty_model, read_model_config
from train.resolve import resolve

LLAMA_8B = str(CHECKOUT / "configs" / "plan" / "llama_8b")
HEADS = sorted((CHECKOUT / "configs" / "heads").glob("*.yaml"))
EAGLE3, DRAFT_LM = "configs/heads/eagle3.yaml", "configs/distill/draft_lm.yaml"
CONFIGS = {
    "smollm2": lambda: read_model_config(TargetConfig().name),
    "llama_8b": lambda: read_model_config(LLAMA_8B),
    "gemma_270m": lambda: Gemma3TextConfig(
        vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, max_position_embeddings=32768, sliding_window=512,
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=4, head_dim=128,
        max_position_embeddings=1024, num_experts=8, moe_intermediate_size=64, pad_token_id=0,
    ),
    "small": lambda: LlamaConfig(vocab_size=900, hidden_size=64, intermediate_size=96, num_hidden_layers=6),
}  # fmt: skip


@cache
def target(name):
    return empty_model(CONFIGS[name](), torch.bfloat16)


def resolved(recipe, name, train=None, *changes):
    schema = PlanHeadsConfig if "head" in read_values(recipe) else PlanDistillConfig
    return resolve(load_config(schema, recipe, changes), target(name), train)


def row(answer):
    return conversation([1], answer, "a")


@pytest.mark.parametrize(
    ("name", "rate", "length", "taps", "block"),
    [
        ("smollm2", 1e-3, 2048, (2, 15, 27), 27),
        ("llama_8b", 3.8e-4, 2048, (2, 16, 29), 29),
        ("gemma_270m", 9.5e-4, 2048, (2, 9, 15), None),  # its blocks norm what a sublayer puts out
        ("qwen3_moe", 5.3e-4, 1024, (2, 12, 21), None),  # no MLP but experts
    ],
)
def test_a_head_follows_its_target(name, rate, length, taps, block, caplog):
    with caplog.at_level("INFO", "draftsmith"):
        found = resolved(EAGLE3, name)
    assert (found.optimizer.learning_rate, found.data.max_length) == (rate, length)
    assert (found.head.draft_vocab_size, found.head.init_block) == (32_768, block)
    assert default_taps(target(name)) == taps
    assert [message.split(": ")[0].removesuffix(" auto") for message in caplog.messages] == [
        "data.max_length", "optimizer.learning_rate", "head.draft_vocab_size", "head.init_block", "head.window",
    ]  # fmt: skip


def test_a_block_that_fits_the_head_alone_is_copied():
    assert resolved(EAGLE3, "smollm2", None, "head.taps=[2, 15, 20]").head.init_block == 20
    assert resolved(EAGLE3, "smollm2", None, "head.taps=[2, 15, 30]").head.init_block is None  # no block reads h_30
    assert resolved(EAGLE3, "smollm2", None, "head.layer={mlp_width: 96}").head.init_block is None


def test_a_small_vocabulary_is_drafted_whole():
    assert resolved("configs/heads/hydra.yaml", "small", [row([1, 2])]).head.draft_vocab_size is None


def test_a_draft_lm_keeps_a_tenth_of_the_blocks():
    found = resolved(DRAFT_LM, "smollm2")
    assert (found.student.layers, found.optimizer.learning_rate) == ([0, 1, 2], 3e-3)
    assert resolved(DRAFT_LM, "gemma_270m").student.layers == [0]
    assert resolved(DRAFT_LM, "small").student.layers == [0]


@pytest.mark.parametrize(
    ("used", "size"), [(range(1), 1024), (range(1024), 1024), (range(1025), 2048), (range(33_000), 32_768)]
)
def test_the_draft_vocabulary_holds_the_tokens_that_answers_use(used, size):
    assert resolved(EAGLE3, "smollm2", [row(list(used) * 2)]).head.draft_vocab_size == size
    assert resolved(DRAFT_LM, "smollm2", [row(list(used))]).student.draft_vocab_size == size


@pytest.mark.parametrize(("long", "max_length", "window"), [(1, 768, 256), (2, 768, 768), (2, 300, 384), (10, 5000, 1408)])
def test_attention_reads_what_nine_tenths_of_the_conversations_have(long, max_length, window):
    train = [conversation([1] * 900, [2] * 400, str(number)) for number in range(long)]
    train += [conversation([1] * 100, [2] * 100, str(number)) for number in range(long, 10)]
    assert resolved(EAGLE3, "smollm2", train, f"data.max_length={max_length}").head.window == window
    assert resolved(EAGLE3, "smollm2", None, "head.window=null").head.window is None


@pytest.mark.parametrize(("num_long", "long", "length"), [(4, 3000, 2048), (5, 3000, 2048), (6, 3000, 3000), (6, 9000, 8192)])
def test_usual_conversations_are_learnt_whole_and_of_longer_ones_what_95_of_100_fit_in(num_long, long, length, caplog):
    train = [conversation([1] * (long - 9), [2] * 9, str(number)) for number in range(num_long)]
    train += [conversation([1] * 100, [2] * 100, str(number)) for number in range(num_long, 100)]
    with caplog.at_level("INFO", "draftsmith"):
        assert resolved(EAGLE3, "smollm2", train).data.max_length == length
    assert f"{num_long if long > length else 0} of 100" in caplog.text


def test_a_packed_row_holds_the_longest_conversation():
    changes = ["data.packing=true", "data.pack_length=700"]
    assert resolved(EAGLE3, "smollm2", None, *changes).data.max_length == 700


@pytest.mark.parametrize("name", [each for each in CONFIGS if each != "small"])
@pytest.mark.parametrize("recipe", HEADS, ids=lambda path: path.stem)
def test_every_recipe_fits_every_target_as_it_stands(recipe, name):
    head = resolved(str(recipe), name).head
    assert AUTO not in head.model_dump().values()
    vocabulary = DraftVocabulary(token_ids_W=torch.arange(1024), target_vocab_size=target(name).config.vocab_size)
    with torch.device("meta"):
        FAMILIES[head.kind].build(head, target(name), vocabulary)
