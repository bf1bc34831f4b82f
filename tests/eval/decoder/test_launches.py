"""A decode round and a training step start no more kernels than before; an operation that is added is named by its place."""

import pytest

from heads.families.eagle3 import Eagle3Layer
from tests.support.launches import count_round, count_step, tiny_target

# Launches by family: drafting and the rest of a greedy round, of a drawn one, and a training step. More need a reason.
MOST = {
    "medusa": (32, 23, 73, 71, 380),
    "hydra": (69, 23, 112, 71, 521),
    "eagle3": (159, 23, 217, 71, 1303),
    "peagle": (129, 23, 180, 71, 2400),
    "dflash": (104, 23, 157, 71, 1690),
    "dspark": (135, 23, 188, 71, 1924),
    "dflash2": (245, 23, 288, 71, 2582),
    "xpress": (195, 23, 433, 71, 3846),
    "domino": (130, 23, 173, 71, 2266),
    "mtp": (349, 23, 406, 71, 1103),
    "early_exit": (587, 354, 638, 402, 257),
}


@pytest.mark.parametrize("kind", MOST)
def test_a_round_and_a_step_start_no_more_kernels_than_before(kind, tmp_path):
    target = tiny_target(tmp_path)
    counted = [*count_round(kind, target, 0.0).values(), *count_round(kind, target, 1.0).values(), count_step(kind, target)]
    more = [launches.by_place for launches, most in zip(counted, MOST[kind], strict=True) if launches.total > most]
    assert more == []


def test_an_operation_that_is_added_is_counted_once_a_draft_and_named_by_its_place(tmp_path, monkeypatch):
    target, forward = tiny_target(tmp_path), Eagle3Layer.forward
    before = count_round("eagle3", target, 0.0)["draft"].by_place
    monkeypatch.setattr(Eagle3Layer, "forward", lambda self, *args: forward(self, *args) + 0)
    added = count_round("eagle3", target, 0.0)["draft"].by_place - before
    assert added.total() == 5
