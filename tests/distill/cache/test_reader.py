"""A cache says at every position what the target says online, and is refused wherever it does not belong."""

import dataclasses
import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from configs.runtime.errors import ConfigError, InputError
from configs.schema.data import CacheConfig
from distill.cache.reader import check_fits, open_cache
from distill.dataset.batches import ConversationDataset, collate_packed
from distill.loss.fused import normalise
from heads.frozen.hidden_states import read_states
from heads.inference.causal_lm import head_logits
from heads.modules.interface import NO_DOCUMENT
from tests.support import family_checks as checks
from tests.support.caches import batch_of, cache_job, flip_a_bit, random_conversations, run, write_rows

TAPS = [0, 2, 4]


@pytest.fixture(scope="module")
def conversations():
    """Eight conversations of random tokens, prompts of 3 to 6 of them, answers of 2 to 23."""
    return random_conversations([(3 + n % 4, 2 + 3 * n) for n in range(8)], checks.VOCAB_SIZE, seed=6)


@pytest.fixture(scope="module")
def target(as_target):
    return as_target(checks.tiny_target("llama"))


@pytest.fixture
def job(tmp_path, data_file, conversations, target):
    """A function that gives the job of making a cache of those conversations, several shards."""

    def make(output="cache", target=target, **settings):
        values = {"taps": TAPS, "dtype": "float32", "batch_size": 3, "shard_megabytes": 0.02} | settings
        return cache_job(target, data_file, conversations, tmp_path / output, **values)

    return make


@pytest.fixture
def data_file(tmp_path, conversations):
    return write_rows(tmp_path / "train.jsonl", conversations)


@pytest.fixture
def cache(job, tmp_path, data_file, target):
    run(job())
    return open_cache(tmp_path / "cache", data_file, target)


# --- what it says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("gemma3", "float32"), ("llama", "bfloat16")])
def test_states_are_those_read_online_to_the_bit(name, dtype, job, tmp_path, data_file, conversations, as_target):
    target = as_target(checks.tiny_target(name))
    run(job(target=target, dtype=dtype, batch_size=1))  # one by one: the shape of a forward decides the last bits
    cache = open_cache(tmp_path / "cache", data_file, target)
    for number in range(len(conversations)):
        batch = batch_of(conversations, [number])
        online = read_states(target.model, batch.input_ids_BT, TAPS)
        online = online.map(lambda state_BTE: state_BTE.to(getattr(torch, dtype)).to(target.model.dtype))
        found = cache.states(batch, TAPS)
        assert torch.equal(found.final_BTE, online.final_BTE)
        assert len(found.taps_ABTE) == len(TAPS)
        assert all(torch.equal(one, other) for one, other in zip(found.taps_ABTE, online.taps_ABTE, strict=True))
        expected = normalise(target.model, online.final_BTE.flatten(0, 1), chunk_size=128)
        assert torch.equal(cache.normalisers(batch).log_sum_P, expected.log_sum_P.float())
        assert torch.equal(cache.normalisers(batch).top1_P, expected.top1_P)


def test_rows_of_a_batch_are_padded_with_nothing_and_taps_come_in_the_order_asked_for(cache, conversations, target):
    batch = batch_of(conversations, [5, 0, 3])
    inside_BT = batch.document_ids_BT == 0
    online = read_states(target.model, batch.input_ids_BT, [4, 0])
    found = pickle.loads(pickle.dumps(cache)).states(batch, [4, 0])  # as a loader's worker may have it
    for one, other in zip([found.final_BTE, *found.taps_ABTE], [online.final_BTE, *online.taps_ABTE], strict=True):
        torch.testing.assert_close(one[inside_BT], other[inside_BT], rtol=1e-6, atol=1e-5)
        assert not one[~inside_BT].any()
    known = cache.normalisers(batch)
    logits_BTV = head_logits(target.model, online.final_BTE).float()
    inside_P = inside_BT.flatten()
    torch.testing.assert_close(known.log_sum_P[inside_P], logits_BTV.logsumexp(-1).flatten()[inside_P], rtol=1e-5, atol=1e-5)
    assert torch.equal(known.top1_P[inside_P], logits_BTV.argmax(-1).flatten()[inside_P])
    assert known.top1_P.dtype == torch.int64
    assert not known.log_sum_P[~inside_P].any()


@pytest.mark.parametrize("max_length", [512, 9])
def test_states_of_packed_rows_are_those_of_their_conversations(cache, conversations, target, max_length):
    examples = list(ConversationDataset(conversations, max_length))
    batch = collate_packed([[examples[number] for number in row] for row in ([6, 1, 3], [7], [2, 0])])
    inside_BT = batch.document_ids_BT != NO_DOCUMENT
    online = read_states(target.model, batch.input_ids_BT, [0, 2], batch.packed_positions_BT)
    found = cache.states(batch, [0, 2])
    for one, other in zip([found.final_BTE, *found.taps_ABTE], [online.final_BTE, *online.taps_ABTE], strict=True):
        torch.testing.assert_close(one[inside_BT], other[inside_BT], rtol=1e-5, atol=1e-5)


def test_reading_keeps_neither_files_nor_maps_open(cache, conversations):
    def held():
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "shard-" in line]
        return len(os.listdir("/proc/self/fd")), maps

    cache.states(batch_of(conversations, [0]))
    before = held()
    for number in range(len(conversations)):
        cache.states(batch_of(conversations, [number]))
    assert held() == before
    assert before[1] == []


# --- damage and refusals ------------------------------------------------------------------------------------------


def link_elsewhere(path):
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


@pytest.mark.parametrize(
    "damage",
    [flip_a_bit, lambda path: path.write_bytes(b"{"), lambda path: path.unlink(), link_elsewhere],
    ids=["bit flipped", "no safetensors file", "missing", "a link"],
)
def test_a_damaged_shard_is_found_when_it_is_needed_and_named(cache, conversations, damage):
    last = int((cache.places.shard_C == 1).nonzero()[0].max())
    damage(cache.folder / "shard-00001.safetensors")
    cache.states(batch_of(conversations, [0]))
    with pytest.raises(InputError, match=r"shard-00001\.safetensors"):
        cache.states(batch_of(conversations, [0, last]))


def test_a_shard_of_another_cache_is_not_read(job, data_file, target, conversations, tmp_path):
    for name, size in (("one", 2), ("other", 3)):
        run(job(name, batch_size=size))
    shards = [tmp_path / name / "shard-00000.safetensors" for name in ("one", "other")]
    shards[0].write_bytes(shards[1].read_bytes())
    with pytest.raises(InputError, match=shards[0].name):
        open_cache(tmp_path / "one", data_file, target).states(batch_of(conversations, [0]))


def test_a_cache_of_another_target_or_of_other_data_is_refused_with_what_differs(cache, data_file, target):
    other = dataclasses.replace(target.identity, weights_sha256="f" * 64, tokenizer_sha256="f" * 64)
    with pytest.raises(InputError, match="target weights and tokenizer"):
        open_cache(cache.folder, data_file, dataclasses.replace(target, identity=other))
    data_file.write_text(data_file.read_text() + "\n")
    with pytest.raises(InputError, match="is not that file"):
        open_cache(cache.folder, data_file, target)


def change_manifest(folder, change):
    content = json.loads((folder / "manifest.json").read_text())
    change(content)
    (folder / "manifest.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda content: content.update(format_version=2), "format_version"),
        (lambda content: content["layout"].update(kind="top_k"), "kind"),
        (lambda content: content.pop("data_sha256"), "data_sha256"),
    ],
)
def test_a_manifest_that_cannot_be_right_is_refused(cache, data_file, target, change, key):
    change_manifest(cache.folder, change)
    with pytest.raises(InputError, match=key):
        open_cache(cache.folder, data_file, target)
    (cache.folder / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"manifest\.json"):
        open_cache(cache.folder, data_file, target)


def test_a_head_of_taps_that_are_not_kept_or_of_a_target_in_another_dtype_is_refused(cache, data_file, target):
    cache.check_keeps([2])
    cache.check_keeps([])
    with pytest.raises(InputError, match=r"\[1, 3\] are missing"):
        cache.check_keeps([1, 2, 3])
    change_manifest(cache.folder, lambda content: content["layout"].update(target_dtype="bfloat16"))
    with pytest.raises(InputError, match=r"target\.dtype"):
        open_cache(cache.folder, data_file, target).check_keeps(TAPS)


def test_conversations_longer_than_the_caches_are_refused(job, tmp_path, data_file, conversations, target):
    run(job(max_length=20))
    cache = open_cache(tmp_path / "cache", data_file, target)
    check_fits(cache, ConversationDataset(conversations, 20))
    with pytest.raises(ConfigError, match=r"data\.max_length"):
        check_fits(cache, ConversationDataset(conversations, 21))


def test_taps_behind_the_last_block_or_out_of_order_are_refused_before_anything_is_written(job, tmp_path):
    with pytest.raises(ConfigError, match="taps"):
        job(taps=[2, 5]).prepare()
    with pytest.raises(ValueError, match="taps"):
        CacheConfig(taps=[3, 1])
    assert not (tmp_path / "cache").exists()
