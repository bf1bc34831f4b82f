"""What decoding and training move besides their work is held to what is on record; a mask or a copy that is added is seen."""

import json

import pytest
import torch

from configs.runtime.files import CHECKOUT
from heads.families.registry import FAMILIES
from heads.inference.kv_cache import RowCache
from scripts.lab.counts import traffic
from scripts.lab.counts.launches import tiny_target
from scripts.lab.counts.roofline import estimate_step

RATIOS = json.loads((CHECKOUT / "docs" / "results" / "launches.json").read_text(encoding="utf-8"))["ratios"]


@pytest.fixture
def target(tmp_path):
    return tiny_target(tmp_path)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_head_reads_a_prompt_without_a_tensor_of_all_pairs(kind, target, monkeypatch):
    assert traffic.count_prefill_masks(kind, target) == RATIOS["prefill_mask_bytes"] == 0
    if kind in ("eagle3", "mtp"):  # which would mask by pairs
        monkeypatch.setattr(RowCache, "is_causal", False)
        assert traffic.count_prefill_masks(kind, target) > 0


def test_verification_reads_the_keys_of_a_group_once(target, monkeypatch):
    assert traffic.count_expanded_bytes(target) == RATIOS["expanded_bytes_per_verification"] == 0
    monkeypatch.setattr(traffic, "make_lean", lambda model: None)  # transformers' own forward expands them
    assert traffic.count_expanded_bytes(target) > 0


def test_a_cuda_graph_copies_ids_positions_and_masks_alone_before_it_runs(target, monkeypatch):
    assert traffic.count_copied_weights(target) == RATIOS["weights_copied_per_replay"] == 0
    monkeypatch.setattr(torch._dynamo, "mark_static_address", lambda tensor: None)
    assert traffic.count_copied_weights(target) > 0


def test_a_round_waits_once(target):
    assert traffic.count_waits(target) == RATIOS["waits_per_round"] == 1


def test_the_estimated_step_is_the_one_on_record(target):
    found = estimate_step(RATIOS["loss_bytes_a_logit_compiled"], traffic.count_sum_bytes(target))
    assert found["mfu"] >= 0.99 * RATIOS["estimated_mfu"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")  # as are all of the compiler's caches, or it counts nothing
def test_compiled_a_loss_moves_a_fifth_of_the_bytes_and_no_more_than_on_record():
    found = traffic.count_loss_bytes()
    assert found["loss_bytes_a_logit_compiled"] <= min(40, RATIOS["loss_bytes_a_logit_compiled"])
    assert found["loss_bytes_a_logit"] <= RATIOS["loss_bytes_a_logit"]
    assert found["loss_bytes_a_logit"] > 5 * found["loss_bytes_a_logit_compiled"]
