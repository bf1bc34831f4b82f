"""Packed rows: what lies in them, in which order they come, how full they are, and what a cache says of them."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from configs.schema.training import DistillConfig
from distill.cache.reader import open_cache
from distill.dataset.batches import BucketedBatchSampler, ConversationDataset, Example
from distill.dataset.packing import PackedBatchSampler, collate_packed
from heads.frozen.hidden_states import read_states
from heads.modules.interface import NO_DOCUMENT
from tests.support.caches import cache_job, conversation, efficiency, random_conversations, run, write_rows

PACK_LENGTH = 96


@pytest.fixture
def dataset():
    lengths = torch.randint(3, 60, (83,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [conversation((number + 1, 2), (7,) * (length - 2)) for number, length in enumerate(lengths)]
    return ConversationDataset(rows, max_length=64)


def sampler_of(lengths, batch_size=4, **settings):
    return PackedBatchSampler(lengths, batch_size, **{"pack_length": PACK_LENGTH, "seed": 0} | settings)


# --- what a row holds ---------------------------------------------------------------------------------------------


def test_a_row_is_its_conversations_one_after_the_other():
    batch = collate_packed([[Example((11, 12, 13), 2, 5), Example((21, 22), 1, 3)], [Example((31, 32, 33, 34), 1, 8)]])
    pad = NO_DOCUMENT
    assert batch.input_ids_BT.tolist() == [[11, 12, 13, 21, 22], [31, 32, 33, 34, 0]]
    assert batch.loss_mask_BT.int().tolist() == [[0, 0, 1, 0, 1], [0, 1, 1, 1, 0]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
    assert batch.document_ids_BT.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, pad]]
    assert batch.conversations_BC.tolist() == [[5, 3], [8, pad]]


# --- which rows, and in what order --------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [0, 1])
def test_every_conversation_comes_once_an_epoch_in_rows_that_hold_it(dataset, epoch):
    sampler = sampler_of(dataset.lengths, window=20)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    rows = [row for batch in batches for row in batch]
    assert sorted(index for row in rows for index in row) == list(range(83))
    assert max(sum(dataset.lengths[list(row)]) for row in rows) <= PACK_LENGTH
    assert [len(batch) for batch in batches[:-1]] == [4] * (len(sampler) - 1)
    assert len(rows) == sampler.num_rows
    assert len(batches) == len(sampler)


def test_chats_of_all_lengths_fill_more_than_97_parts_in_100():
    lengths = np.clip(np.random.default_rng(0).lognormal(5.3, 0.8, 6000), 10, 1024).astype(int)
    packed = efficiency(sampler_of(lengths, 8, pack_length=2048), lengths)
    assert packed > 0.97
    assert packed > efficiency(BucketedBatchSampler(lengths, 8, seed=0), lengths)


# --- what a cache says --------------------------------------------------------------------------------------------


@pytest.fixture
def cached(tmp_path, byte_target):
    """A function that gives eight conversations and a cache of them."""

    def make(**settings):
        rows = random_conversations([(3, 1 + 2 * number) for number in range(8)], 258, seed=5)
        data = write_rows(tmp_path / "train.jsonl", rows)
        run(cache_job(byte_target, data, rows, tmp_path / "cache", batch_size=3, shard_megabytes=0.008, **settings))
        return rows, open_cache(tmp_path / "cache", data, byte_target)

    return make


def packed_batch(rows, max_length=512):
    examples = list(ConversationDataset(rows, max_length))
    return collate_packed([[examples[number] for number in row] for row in ([6, 1, 3], [7], [2, 0])])


@pytest.mark.parametrize(("max_length", "taps"), [(512, []), (9, [0, 2])])
def test_hidden_states_of_packed_rows_come_from_the_cache(cached, byte_target, max_length, taps):
    rows, cache = cached(dtype="float32", taps=taps)
    batch = packed_batch(rows, max_length)
    kept_BT = batch.document_ids_BT != NO_DOCUMENT
    online = read_states(byte_target.model, batch.input_ids_BT, taps, batch.packed_positions_BT)
    found = cache.states(batch, taps)
    for one, other in zip([found.final_BTE, *found.taps_ABTE], [online.final_BTE, *online.taps_ABTE], strict=True):
        torch.testing.assert_close(one[kept_BT], other[kept_BT], rtol=1e-5, atol=1e-5)


# --- what may be asked for ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"data": {"pack_length": 1024}}, "pack_length is for packed rows"),
        ({"data": {"packing": True, "pack_length": 100}}, "at least max_length"),
        ({"data": {"packing": False}}, "True"),
        ({"data": {"packing": True}, "policy": {"on_policy": 0.5}}, "a row has to be one conversation"),
    ],
)
def test_settings_that_contradict_packing_are_refused(config, complaint):
    with pytest.raises(ValidationError, match=complaint):
        DistillConfig.model_validate(config)
    assert DistillConfig.model_validate({"data": {"packing": True, "max_length": 300}}).data.row_length == 1200
