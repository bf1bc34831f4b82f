"""Training on states that servers compute: the run is that on the local target, of which the ends alone are loaded."""

import json
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from configs.runtime.errors import ConfigError, InputError
from configs.schema.data import CacheConfig
from configs.schema.target import TargetConfig
from configs.schema.training import DistillConfig, HeadsConfig
from distill.cache.reader import open_cache
from distill.cache.writer import make_cache
from distill.dataset.batches import ConversationDataset, collate, make_loader
from distill.dataset.conversations import FORMAT_VERSION, MANIFEST, read_conversations
from distill.server.states import EngineStates, texts
from heads.frozen.hidden_states import blocks, read_states
from heads.frozen.loading import load_target
from tests.support.caches import write_rows
from tests.support.checkpoints import last_on_disk
from tests.support.states_server import states_served
from tests.support.training_runs import read_metrics
from train.launch import run_distillation, run_heads
from train.loop.telemetry import METRICS_FILE

TAPS = [1, 2, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llama, tiny_tokenizer):
    """A folder with a target of three blocks."""
    folder = tmp_path_factory.mktemp("target")
    tiny_llama(seed=1, dtype=torch.float32, layers=3).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(folder):
    return load_target(TargetConfig(name=str(folder), dtype="float32", device="cpu"))


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "states").mkdir()
    return tmp_path / "states"


@pytest.fixture
def servers(whole, disk):
    """Two servers of the target's states."""
    with states_served(whole, TAPS, disk) as first, states_served(whole, TAPS, disk) as second:
        yield first, second


@pytest.fixture
def settings(folder, disk, servers):
    """The target's settings for training from these servers."""
    states = {"urls": [each.url for each in servers], "path": str(disk), "concurrency": 2, "retries": 0}
    return {"name": str(folder), "dtype": "float32", "device": "cpu", "states": states}


@pytest.fixture
def opened(settings):
    """A function that loads the target's ends and connects it with the servers; further settings are of `states`."""
    with ExitStack() as stack:

        def open_target(**changed):
            config = TargetConfig.model_validate(settings | {"states": settings["states"] | changed})
            target = load_target(config, takes_states=True)
            return replace(target, states_from=stack.enter_context(closing(EngineStates(config.states, target))))

        yield open_target


@pytest.fixture
def data(tmp_path, whole, greedy_rows):
    """The files of a training, as settings of its section data."""
    write_rows(tmp_path / "train.jsonl", greedy_rows)
    others = [replace(row, messages=({"role": "user", "content": f"other {row.prompt_id}"},)) for row in greedy_rows[:4]]
    write_rows(tmp_path / "held_out.jsonl", others)
    (tmp_path / MANIFEST).write_text(json.dumps({"format_version": FORMAT_VERSION, "target": whole.identity.to_dict()}))
    return {"train": str(tmp_path / "train.jsonl"), "held_out": str(tmp_path / "held_out.jsonl"), "max_length": 64}


SCHEDULE = {"batch_size": 4, "max_steps": 6, "mixed_precision": "no", "trackers": [], "log_every_steps": 3}
HELD_OUT = {"num_prompts": 4, "decode": {"num_speculative_tokens": 3, "max_new_tokens": 10, "batch_size": 2}}


def heads_config(target, data, output, **more):
    common = {"head": HEAD, "schedule": SCHEDULE, "held_out": HELD_OUT, "sanity": {"learning_rate": 1e-2}}
    return HeadsConfig.model_validate(
        {"target": target, "data": data, "num_speculative_tokens": 3, "output": str(output)} | common | more
    )


def outcome(output):
    kept = json.loads((output / "outcome.json").read_text())
    return load_file(output / "artifact" / "model.safetensors"), kept["best_score"]


HEAD = {"kind": "eagle3", "taps": TAPS, "num_depths": 3}


def test_a_head_trained_from_servers_is_the_one_trained_from_the_local_target(tmp_path, settings, data, servers, disk):
    local = {name: value for name, value in settings.items() if name != "states"}
    for name, target in (("local", local), ("served", settings)):
        torch.manual_seed(0)
        assert run_heads(heads_config(target, data, tmp_path / name, head=HEAD)) == 0
    (expected, tau), (found, served_tau) = outcome(tmp_path / "local"), outcome(tmp_path / "served")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert served_tau == tau > 1
    assert all(server.asked for server in servers)
    assert list(disk.iterdir()) == []
    assert max(server.most_files for server in servers) <= 4


@pytest.mark.parametrize("on_disk", [False, True], ids=["ends", "blocks on disk"])
def test_states_of_a_batch_are_the_targets_whatever_the_rows_hold(opened, settings, whole, greedy_rows, on_disk):
    if on_disk:
        settings |= last_on_disk(settings["name"], len(blocks(whole.model)))
    target = opened(prefetch=2)
    assert all(each.is_meta for each in blocks(target.model).parameters())
    (batch, *_) = make_loader(ConversationDataset(greedy_rows, 64), 2, seed=0, pack_length=60)
    assert len(list(texts(batch))) > 3
    found = target.states_from.states(batch, [3, 1])
    expected = read_states(whole.model, batch.input_ids_BT, [3, 1], batch.packed_positions_BT)
    there_BT = batch.document_ids_BT >= 0
    for one, other in zip((found.final_BTE, *found.taps_ABTE), (expected.final_BTE, *expected.taps_ABTE), strict=True):
        torch.testing.assert_close(one[there_BT], other[there_BT], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("student", [{"init": "fresh", "overrides": {"num_hidden_layers": 1}}, {"layers": [0, 2]}])
def test_a_draft_is_distilled_from_servers_as_from_the_local_target(tmp_path, settings, data, student):
    local = {name: value for name, value in settings.items() if name != "states"}
    losses = {}
    for name, target in (("local", local), ("served", settings)):
        config = {"target": target, "data": data, "schedule": SCHEDULE, "held_out": HELD_OUT, "output": str(tmp_path / name)}
        assert run_distillation(DistillConfig.model_validate(config | {"student": student})) == 0
        losses[name] = [row["loss"] for row in read_metrics(tmp_path / name / METRICS_FILE)]
    assert losses["served"] == pytest.approx(losses["local"], rel=1e-5)


@pytest.mark.parametrize("kept", [{"taps": TAPS, "dtype": "float32"}, {}])
def test_a_cache_made_by_servers_holds_what_the_local_target_would_write(tmp_path, settings, whole, data, disk, kept):
    caches = []
    for name in ("served", "local"):
        target = settings if name == "served" else settings | {"states": None}
        made = {"data": data["train"], "max_length": 64, "shard_megabytes": 0.002, "output": str(tmp_path / name)}
        config = CacheConfig.model_validate({"target": target} | made | kept)
        make_cache(config)
        caches.append(open_cache(tmp_path / name, tmp_path / "train.jsonl", whole))
    assert len(list((tmp_path / "served").glob("shard-*"))) > 3
    batch = collate(list(ConversationDataset(read_conversations(tmp_path / "train.jsonl"), 64)))
    served, local = (cache.states(batch, cache.manifest.layout.taps) for cache in caches)
    for one, other in zip([served.final_BTE, *served.taps_ABTE], [local.final_BTE, *local.taps_ABTE], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2 if not kept else 1e-4, atol=1e-4)
    assert list(disk.iterdir()) == []


def test_several_servers_give_the_targets_states_and_one_that_fails_ends_the_run_by_its_name(
    opened, servers, whole, greedy_rows, disk, monkeypatch
):
    monkeypatch.setattr("distill.server.connection.pause", lambda stopping, seconds: None)
    target = opened(retries=2, timeout_seconds=2)
    batches = [collate(list(ConversationDataset(greedy_rows, 64))[start : start + 4]) for start in (0, 4, 8, 12)]
    servers[0].troubles = ["reset"]  # which passes
    coming = target.states_from.ahead(iter(batches))
    found = [target.states_from.states(batch, TAPS) for batch in coming]
    assert all(len(server.asked) > 2 for server in servers)
    for batch, states in zip(batches, found, strict=True):
        expected = read_states(whole.model, batch.input_ids_BT, TAPS)
        there_BT = batch.document_ids_BT >= 0
        torch.testing.assert_close(states.joined_BTF[there_BT], expected.joined_BTF[there_BT], rtol=1e-4, atol=1e-5)
    for server in servers:
        server.file_troubles = ["lost"] * 9
    with pytest.raises(InputError, match=r"target\.states\.urls: http.* is not"):
        target.states_from.states(batches[0], TAPS)
    target.states_from.close()
    assert list(disk.iterdir()) == []


def test_what_cannot_be_had_is_said_in_one_sentence(
    tmp_path, opened, settings, servers, whole, tiny_llama, as_target, disk, data, greedy_rows
):
    def refused(match, **changed):
        with pytest.raises(InputError, match=match):
            opened(**changed)

    for sizes in ({}, {"hidden_size": 64}):
        other = as_target(tiny_llama(seed=2, dtype=torch.float32, layers=3, **sizes))
        with states_served(other, TAPS, disk) as wrong:
            refused("does not serve target", urls=[wrong.url])
    with states_served(whole, [1, 2], disk) as fewer:
        refused("taps", urls=[fewer.url])
        refused("start all alike", urls=[servers[0].url, fewer.url])
    refused("path", path=data["train"])
    servers[0].file_troubles = ["cut"]
    refused(r"target\.states\.path", timeout_seconds=0.2)
    servers[0].name = "llama"
    refused("serves llama", urls=[servers[0].url])
    servers[0].name = "states-1-2-3"
    with pytest.raises(InputError, match=r"taps .* and \[0, 3\] are needed: \[0\] are missing"):
        opened().states_from.serve([0])
    with pytest.raises(ConfigError, match=r"target\.states is for training and scripts/cache.py"):
        load_target(TargetConfig.model_validate(settings))
    with pytest.raises(ValueError, match=r"held_out\.decode\.tree: target.states gives the states of texts"):
        heads_config(settings, data, tmp_path / "out", held_out={"decode": {"tree": {"kind": "static", "branching": [2, 2]}}})
    with pytest.raises(ValueError, match=r"held_out\.decode\.kv_cache: with target.states the servers keep"):
        heads_config(settings, data, tmp_path / "out", held_out={"decode": {"kv_cache": "int8"}})
