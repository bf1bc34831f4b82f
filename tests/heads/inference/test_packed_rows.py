"""What transformers is told of packing it is told for that forward only."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch
from transformers import masking_utils

from heads.inference.causal_lm import knowing_packing

POSITIONS_BT = torch.tensor([[0, 1, 2, 0, 1]])
DOCUMENTS_BT = torch.tensor([[0, 0, 0, 1, 1]])


def found():
    return masking_utils.find_packed_sequence_indices(POSITIONS_BT)


def test_threads_that_overlap_are_told_each_its_own_and_afterwards_transformers_looks_itself():
    together = Barrier(2, timeout=30)

    def forward(packed):
        with knowing_packing(packed=packed):
            together.wait()
            seen = found()
            together.wait()
        return seen

    with ThreadPoolExecutor(2) as pool:
        apart_BT, nothing = pool.map(forward, [True, False])
    assert apart_BT.equal(DOCUMENTS_BT)
    assert nothing is None
    assert found().equal(DOCUMENTS_BT)
