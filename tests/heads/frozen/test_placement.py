"""A target whose blocks are spread or split: where they go, that it is the target it was, and what starts from its blocks."""

from pathlib import Path

import pytest
import torch

from configs.runtime.errors import ConfigError
from configs.schema.decoding import DecodeConfig
from configs.schema.target import TargetConfig
from eval.decoder.decode import generate
from eval.teacher_forcing import widened
from heads.families.mtp import copy_block
from heads.frozen import processes
from heads.frozen.hidden_states import blocks, read_states
from heads.frozen.loading import load_target
from heads.frozen.placement import spread_blocks
from tests.support.checkpoints import last_on_disk

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def settings(tmp_path_factory, tiny_llama, tiny_tokenizer):
    """A function that gives settings of a folder's target of 4 blocks, with others in their place."""
    folder = tmp_path_factory.mktemp("spread")
    tiny_llama(seed=1, dtype=torch.float32, layers=4).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return lambda **others: TargetConfig.model_validate({"name": str(folder), "dtype": "float32", "device": "cpu"} | others)


@pytest.fixture(scope="module")
def whole(settings):
    return load_target(settings())


@pytest.fixture(scope="module")
def spread(settings):
    """The same target with its blocks 2 and 3 on disk."""
    return load_target(settings(**last_on_disk(settings().name, 2)))


def on_meta(target):
    return [all(each.is_meta for each in block.parameters()) for block in blocks(target.model)]


@pytest.mark.parametrize(
    ("room", "home", "places"),
    [
        ({"cpu": 1000}, "cpu", ["cpu"] * 6),
        ({"cpu": 500}, "cpu", ["cpu"] * 3 + ["disk"] * 3),  # 400 without the rest, and room for a block that runs
        ({0: 450, 1: 200, "cpu": 200}, 0, [0, 0, 1, 1, "cpu", "cpu"]),
        ({0: 450, 1: 200, "cpu": 100}, 0, [0, 0, 1, 1, "disk", "disk"]),
    ],
)
def test_blocks_go_to_devices_then_to_memory_then_to_disk(room, home, places):
    layers = torch.nn.ModuleList(torch.nn.Linear(5, 5, bias=False, device="meta") for _ in range(6))  # of 100 bytes
    assert spread_blocks(layers, 100, room, home) == places


def test_a_spread_target_says_what_the_whole_one_says_and_its_blocks_go_back_to_disk(whole, spread):
    ids_BT = torch.randint(64, (3, 20), generator=torch.Generator().manual_seed(0))
    taps = [0, 1, 2, 4]
    assert on_meta(whole) == [False] * 4
    assert on_meta(spread) == [False, False, True, True]
    one, other = read_states(whole.model, ids_BT, taps), read_states(spread.model, ids_BT, taps)
    assert torch.equal(one.final_BTE, other.final_BTE)
    assert torch.equal(one.joined_BTF, other.joined_BTF)
    assert on_meta(spread) == [False, False, True, True]
    assert spread.identity == whole.identity
    assert spread.device == CPU


def test_decoding_gives_the_same_tokens(whole, spread):
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]
    config = DecodeConfig(num_speculative_tokens=0, max_new_tokens=12, batch_size=2, kv_cache="int8")
    assert generate(spread, prompts, config) == generate(whole, prompts, config)


def test_a_copied_block_runs_by_itself_and_can_be_trained(whole, spread):
    copied = copy_block(spread.model, 2)
    torch.testing.assert_close(copied.state_dict(), blocks(whole.model)[2].state_dict(), rtol=0, atol=0)
    assert all(each.requires_grad for each in copied.parameters())
    states_BTE = torch.randn(1, 5, 32)
    rotation = whole.model.model.rotary_emb(states_BTE, torch.arange(5).unsqueeze(0))
    one, other = (each(states_BTE, position_embeddings=rotation) for each in (copied, blocks(whole.model)[2]))
    assert torch.equal(one, other)
    one.sum().backward()
    assert on_meta(spread) == [False, False, True, True]


def test_a_spread_target_is_widened_by_loading_it_anew(whole, spread):
    ids_BT = torch.arange(5, 15).unsqueeze(0)
    with widened(spread) as wide, widened(whole) as expected:
        assert wide.model.dtype == torch.float64
        assert on_meta(wide)[-1]
        assert torch.equal(wide.model(ids_BT).logits, expected.model(ids_BT).logits)


def test_several_processes_are_refused(settings, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"target\.device_map"):
        load_target(settings(device_map="auto"))


# --- split over processes ----------------------------------------------------------------------------------------------


def test_groups_that_do_not_divide_the_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"target\.shards"):
        processes.split_arguments(Path("none"), TargetConfig(device="cpu", shards=3), torch.device("cpu"))
