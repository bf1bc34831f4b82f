"""A decode round starts no more kernels than before; an operation that is added is named by its place."""

import pytest

from tests.support.launches import count_round, tiny_target

# Launches by family: of a greedy round and of a drawn one. More need a reason.
MOST = {
    "medusa": (55, 144),
    "hydra": (92, 183),
    "eagle3": (182, 288),
    "peagle": (152, 251),
    "dflash": (127, 228),
    "dspark": (158, 259),
    "dflash2": (268, 359),
    "xpress": (218, 504),
    "domino": (153, 244),
    "mtp": (372, 477),
    "early_exit": (941, 1040),
}


@pytest.mark.parametrize("kind", MOST)
def test_a_round_starts_no_more_kernels_than_before(kind, tmp_path):
    counted = [count_round(kind, tiny_target(tmp_path), temperature) for temperature in (0.0, 1.0)]
    assert [each.by_place for each, most in zip(counted, MOST[kind], strict=True) if each.total > most] == []
