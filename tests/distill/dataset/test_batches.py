"""Batches: which tokens are labels, in what order conversations come, what padding costs, and packed rows."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from pydantic import ValidationError

from configs.runtime.errors import InputError
from configs.schema.training import DistillConfig
from distill.dataset.batches import (
    BucketedBatchSampler,
    ConversationDataset,
    Example,
    PackedBatchSampler,
    collate,
    collate_packed,
    make_loader,
)
from heads.modules.interface import NO_DOCUMENT
from tests.support.caches import conversation, efficiency


@pytest.fixture
def dataset():
    lengths = torch.randint(2, 60, (83,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [conversation((number + 1,), (7,) * (length - 1)) for number, length in enumerate(lengths)]
    return ConversationDataset(rows, max_length=64)


def first_ids(batches):
    return [batch.input_ids_BT[:, 0].tolist() for batch in batches]


def test_the_mask_marks_the_label_and_not_the_position_that_predicts_it():
    rows = [conversation((11, 12, 13), (21, 22)), conversation((31,), (41,))]
    batch = collate(ConversationDataset(rows, max_length=10))
    assert batch.input_ids_BT.tolist() == [[11, 12, 13, 21, 22], [31, 41, 0, 0, 0]]
    assert batch.loss_mask_BT.tolist() == [[False, False, False, True, True], [False, True, False, False, False]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3, 4]] * 2
    pad = NO_DOCUMENT
    assert batch.document_ids_BT.tolist() == [[0] * 5, [0, 0, pad, pad, pad]]


def test_long_conversations_are_cut_at_the_end_and_those_without_an_answer_left_are_counted():
    rows = [conversation((1, 2), (3, 4, 5)), conversation((1, 2, 3, 4), (5,)), conversation((1,), (2,))]
    dataset = ConversationDataset(rows, max_length=4)
    assert [example.input_ids for example in dataset] == [(1, 2, 3, 4), (1, 2)]
    assert (dataset.num_dropped, dataset.num_cut) == (1, 1)
    assert dataset.num_labels == 3


@pytest.mark.parametrize(
    ("max_length", "mask", "starts"), [(9, [0, 1, 1, 0, 0, 1, 0, 1], 7), (7, [0, 1, 1, 0, 0, 1], 5), (2, [0, 1], 1)]
)
def test_all_answers_of_a_row_are_labels_as_far_as_it_goes(max_length, mask, starts):
    dataset = ConversationDataset([conversation(tuple(range(11, 18)), (21,), earlier=((1, 3), (5, 6)))], max_length)
    batch = collate(dataset)
    assert batch.loss_mask_BT.int().tolist() == [mask]
    assert batch.input_ids_BT[0].tolist() == [*range(11, 18), 21][: len(mask)]
    assert (dataset.lengths.tolist(), dataset.answer_starts.tolist()) == ([len(mask)], [starts])
    assert (dataset.num_labels, batch.num_labels) == (sum(mask), sum(mask))


def test_fewer_conversations_are_part_of_more_and_no_more_than_there_are():
    rows = [conversation((number,), (1, 2)) for number in range(50)]
    few, more = (ConversationDataset(rows, 8, number) for number in (10, 30))
    assert (len(few), len(more)) == (10, 30)
    assert set(few.numbers) < set(more.numbers)
    assert few.numbers.max() > 30  # of the whole file
    assert [example.input_ids[0] for example in few] == few.numbers.tolist()
    with pytest.raises(InputError, match=r"num_conversations: 51.*has 50"):
        ConversationDataset(rows, 8, 51)


def test_the_order_depends_on_seed_and_epoch_alone(dataset):
    loader, again = make_loader(dataset, 8, seed=3), make_loader(dataset, 8, seed=3)
    first_epoch = first_ids(loader)
    assert first_ids(loader) == first_epoch
    again.batch_sampler.set_epoch(1)
    second_epoch = first_ids(again)
    assert second_epoch != first_epoch
    loader.batch_sampler.set_epoch(1)
    assert first_ids(loader) == second_epoch
    assert first_ids(make_loader(dataset, 8, seed=4)) != first_epoch


@pytest.mark.parametrize(("num_processes", "num_batches"), [(2, 1), (3, 6)])
def test_processes_share_an_epoch_and_follow_its_number(dataset, num_processes, num_batches):
    def epoch_of(rank, epoch):
        loader = make_loader(dataset, 8, seed=0, num_batches=num_batches)
        loader = prepare_data_loader(loader, num_processes=num_processes, process_index=rank, put_on_device=False)
        loader.set_epoch(epoch)
        return first_ids(loader)

    for epoch in (0, 1):
        whole = make_loader(dataset, 8, seed=0, num_batches=num_batches)
        whole.batch_sampler.set_epoch(epoch)
        shares = [epoch_of(rank, epoch) for rank in range(num_processes)]
        alternating = list(itertools.chain(*zip(*shares, strict=True)))
        assert alternating[:10] == first_ids(whole)[:10]
        assert {first for batch in alternating for first in batch} == set(range(1, 84))
        if num_batches > 1:  # no conversation twice
            assert sum(map(len, alternating)) == 83


def test_the_batches_of_a_step_are_of_similar_length(dataset):
    shared = list(BucketedBatchSampler(dataset.lengths, 4, seed=0, num_batches=4))
    positions = [len(batch) * max(dataset.lengths[batch]) for batch in shared]
    steps = [positions[start : start + 4] for start in range(0, len(positions) - 4, 4)]  # the last one has fewer rows
    assert len(steps) == 5
    assert max(max(step) / min(step) for step in steps) < 1.5


@pytest.mark.parametrize(("num_rows", "num_repeated"), [(1, 3), (3, 1), (8, 0), (9, 3), (12, 0)])
def test_a_last_step_with_fewer_conversations_than_batches_takes_more_of_those_of_the_first(num_rows, num_repeated):
    sampler = BucketedBatchSampler(range(1, num_rows + 1), 2, seed=0, num_batches=4)
    batches = list(sampler)
    assert len(batches) == len(sampler) == (4 if num_rows <= 8 else 8)
    shared, first = list(itertools.chain(*batches)), set(itertools.chain(*batches[:4]))
    assert set(shared) == set(range(num_rows))
    repeated = Counter(shared) - Counter(range(num_rows))
    assert repeated.total() == num_repeated
    assert repeated.keys() <= first


# --- packed rows -------------------------------------------------------------------------------------------------


def sampler_of(lengths, batch_size=4, **settings):
    return PackedBatchSampler(lengths, batch_size, **{"pack_length": 96, "seed": 0} | settings)


def test_conversations_may_fill_a_row_to_its_end():
    assert sampler_of([96, 96]).num_rows == 2


def test_a_row_is_its_conversations_one_after_the_other():
    batch = collate_packed([[Example((11, 12, 13), 2, 5), Example((21, 22), 1, 3)], [Example((31, 32, 33, 34), 1, 8)]])
    pad = NO_DOCUMENT
    assert batch.input_ids_BT.tolist() == [[11, 12, 13, 21, 22], [31, 32, 33, 34, 0]]
    assert batch.loss_mask_BT.int().tolist() == [[0, 0, 1, 0, 1], [0, 1, 1, 1, 0]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
    assert batch.document_ids_BT.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, pad]]
    assert batch.conversations_BC.tolist() == [[5, 3], [8, pad]]


@pytest.mark.parametrize("epoch", [0, 1])
def test_every_conversation_comes_once_an_epoch_in_rows_that_hold_it(dataset, epoch):
    sampler = sampler_of(dataset.lengths, window=20)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    rows = [row for batch in batches for row in batch]
    assert sorted(index for row in rows for index in row) == list(range(83))
    assert max(sum(dataset.lengths[list(row)]) for row in rows) <= 96
    assert [len(batch) for batch in batches[:-1]] == [4] * (len(sampler) - 1)
    assert len(rows) == sampler.num_rows
    assert len(batches) == len(sampler)


def test_chats_of_all_lengths_fill_more_than_97_parts_in_100_and_buckets_pad_less_than_the_order_given():
    lengths = np.clip(np.random.default_rng(0).lognormal(5.3, 0.8, 6000), 10, 1024).astype(int)
    packed = efficiency(sampler_of(lengths, 8, pack_length=2048), lengths)
    bucketed, unsorted = (efficiency(BucketedBatchSampler(lengths, 8, seed=0, window=each), lengths) for each in (16, 1))
    assert packed > 0.97
    assert packed > bucketed
    assert 1 - bucketed < 0.5 * (1 - unsorted)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"data": {"pack_length": 1024}}, "pack_length is for packed rows"),
        ({"data": {"packing": True, "pack_length": 100}}, "at least max_length"),
        ({"data": {"packing": True}, "policy": {"on_policy": 0.5}}, "a row has to be one conversation"),
    ],
)
def test_settings_that_contradict_packing_are_refused(config, complaint):
    with pytest.raises(ValidationError, match=complaint):
        DistillConfig.model_validate(config)
    assert DistillConfig.model_validate({"data": {"packing": True, "max_length": 300}}).data.row_length == 1200
