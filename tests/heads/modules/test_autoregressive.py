"""Features that wait for the head: those of each row in order, and no more in memory than wait."""

import random

import torch

from heads.modules.autoregressive import PendingFeatures
from heads.proposers.protocol import RoundInputs
from heads.sampling.counter_rng import CounterRNG

CPU = torch.device("cpu")


def test_rows_read_their_own_features_again_and_hold_no_others():
    """The feature of position t of row b is 100 b + t."""
    draw = random.Random(0)
    rows, longest = 3, 9
    lengths = [4, longest, 1]
    features_BTF = (100 * torch.arange(rows).view(-1, 1, 1) + torch.arange(longest).view(1, -1, 1)).float()
    pending, first = PendingFeatures(features_BTF, lengths), [0] * rows
    for _ in range(30):
        window = pending.read(RoundInputs.of([list(range(length + 1)) for length in lengths], CounterRNG(0, [0] * rows, CPU)))
        for row, (begin, end) in enumerate(zip(first, lengths, strict=True)):
            expected = [100.0 * row + place for place in range(begin, end)]
            assert window.features_BTF[row, : end - begin, 0].tolist() == expected
            assert window.next_BT[row, : end - begin].tolist() == list(range(begin + 1, end + 1))
        counts = [draw.randint(1, 4) for _ in range(rows)]
        kept = [draw.randint(0, min(2, length - begin)) for begin, length in zip(first, lengths, strict=True)]
        new_BTF = torch.full((rows, 4, 1), -1.0)
        for row, count in enumerate(counts):
            new_BTF[row, :count, 0] = 100 * row + lengths[row] + torch.arange(count)
        pending.move_on(new_BTF, counts, kept)
        first = [length - n for length, n in zip(lengths, kept, strict=True)]
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        # A row may have kept the last columns of a read that was longer than its own.
        assert pending._kept_BSF.shape[1] <= longest + 4
