"""A target whose blocks are spread or split: where they go, that it is the target it was, and what starts from its blocks."""

from pathlib import Path

import pytest
import torch

from configs.runtime.errors import ConfigError, InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.target import TargetConfig
from eval.decoder.decode import generate
from eval.lossless.teacher_forcing import widened
from heads.families.mtp import copy_block
from heads.frozen import processes
from heads.frozen.hidden_states import blocks, read_states
from heads.frozen.loading import load_target
from heads.frozen.placement import place_parts, spread_blocks

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
    """The same target with its blocks 1 and 2 on disk."""
    return load_target(settings(device_map={"model.layers.1": "disk", "model.layers.2": "disk", "lm_head": "cpu"}))


def on_meta(target):
    return [all(each.is_meta for each in block.parameters()) for block in blocks(target.model)]


@pytest.mark.parametrize(
    ("room", "home", "places"),
    [
        ({"cpu": 1000}, "cpu", ["cpu"] * 6),
        ({"cpu": 500}, "cpu", ["cpu"] * 3 + ["disk"] * 3),  # 400 without the rest, and room for a block that runs
        ({0: 450, 1: 1000, "cpu": 500}, 0, [0] * 2 + [1] * 4),
        ({0: 450, 1: 200, "cpu": 200}, 0, [0, 0, 1, 1, "cpu", "cpu"]),
        ({0: 450, 1: 200, "cpu": 100}, 0, [0, 0, 1, 1, "disk", "disk"]),
    ],
)
def test_blocks_go_to_devices_then_to_memory_then_to_disk(room, home, places):
    layers = torch.nn.ModuleList(torch.nn.Linear(5, 5, bias=False, device="meta") for _ in range(6))  # of 100 bytes
    assert spread_blocks(layers, 100, room, home, even=False) == places


def test_max_memory_sends_the_last_blocks_to_disk(settings, whole):
    block, outside = (sum(each.numel() for each in part.parameters()) for part in (blocks(whole.model)[0], whole.model))
    outside -= 4 * block
    config = settings(device_map="auto", max_memory={"cpu": 4 * (outside + 3 * block)})
    places = place_parts(config.name, config, CPU)
    assert [places[f"model.layers.{number}"] for number in range(4)] == ["cpu", "cpu", "disk", "disk"]
    assert {name for name, place in places.items() if place == "cpu"} > {"model.embed_tokens", "model.norm", "lm_head"}


def test_a_spread_target_says_what_the_whole_one_says_and_its_blocks_go_back_to_disk(whole, spread):
    ids_BT = torch.randint(64, (3, 20), generator=torch.Generator().manual_seed(0))
    taps = [0, 1, 2, 4]
    assert on_meta(whole) == [False] * 4
    assert on_meta(spread) == [False, True, True, False]
    one, other = read_states(whole.model, ids_BT, taps), read_states(spread.model, ids_BT, taps)
    assert torch.equal(one.final_BTE, other.final_BTE)
    assert torch.equal(one.joined_BTF, other.joined_BTF)
    assert on_meta(spread) == [False, True, True, False]
    assert spread.identity == whole.identity
    assert spread.device == CPU


@pytest.mark.parametrize("cache", [None, "int8"])
def test_decoding_gives_the_same_tokens(whole, spread, cache):
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]
    config = DecodeConfig(num_speculative_tokens=0, max_new_tokens=12, batch_size=2, kv_cache=cache)
    assert generate(spread, prompts, config) == generate(whole, prompts, config)


def test_a_copied_block_runs_by_itself_and_can_be_trained(whole, spread):
    copied = copy_block(spread.model, 1)
    torch.testing.assert_close(copied.state_dict(), blocks(whole.model)[1].state_dict(), rtol=0, atol=0)
    assert all(each.requires_grad for each in copied.parameters())
    assert not any("_hf_hook" in each.__dict__ for each in copied.modules())
    states_BTE = torch.randn(1, 5, 32)
    rotation = whole.model.model.rotary_emb(states_BTE, torch.arange(5).unsqueeze(0))
    one, other = (each(states_BTE, position_embeddings=rotation) for each in (copied, blocks(whole.model)[1]))
    assert torch.equal(one, other)
    one.sum().backward()
    assert on_meta(spread) == [False, True, True, False]


def test_a_spread_target_is_widened_by_loading_it_anew(whole, spread):
    wide = widened(spread)
    ids_BT = torch.arange(5, 15).unsqueeze(0)
    assert wide.model.dtype == torch.float64
    assert on_meta(wide) == [False, True, True, False]
    assert torch.equal(wide.model(ids_BT).logits, widened(whole).model(ids_BT).logits)


@pytest.mark.parametrize(
    ("device_map", "complaint"),
    [
        ({"lm_head": "disk"}, r"'lm_head' is no block .* lies on target\.device, here cpu"),
        ({"model.layers.4": "disk"}, r"'model\.layers\.4' is no block .* model\.layers\.0 to model\.layers\.3"),
        ({"model.layers": "abacus:1"}, "device 'abacus:1' cannot be used"),
    ],
)
def test_a_map_that_does_not_fit_the_target_is_refused(settings, device_map, complaint):
    with pytest.raises(InputError, match=complaint):
        load_target(settings(device_map=device_map))


def test_several_processes_need_a_map_by_hand(settings, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="each of 2 processes would spread a target of its own by 'auto'"):
        place_parts(settings().name, settings(device_map="auto"), CPU)
    assert place_parts(settings().name, settings(device_map={"model.layers.1": "disk"}), CPU)["model.layers.1"] == "disk"


# --- split over processes ----------------------------------------------------------------------------------------------


def test_groups_that_do_not_divide_the_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"target\.shards"):
        processes.split_arguments(Path("none"), TargetConfig(device="cpu", shards=3), torch.device("cpu"))
