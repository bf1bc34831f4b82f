"""Shares of memory and of traffic: against rings sent by hand, and identities that hold for any recipe."""

from itertools import pairwise

import pytest

from configs.planning import PlanHeadsConfig
from train.plan_memory import ENGINES, GIBIBYTE, HEADROOM, Memory, needed_bytes
from train.plan_scaling import DDP, REPLICATED, SHARDED, SPLIT, ring_bytes, scale
from train.planning import make_plan

MEMORY = Memory(
    target_weights=1000,
    draft_weights=400,
    frozen_draft=10,
    gradients=400,
    optimizer_states=800,
    draft_activations=50,
    target_activations=20,
    loss_logits=5,
    held_out_kv=3,
)


@pytest.fixture
def plan(tmp_path, greedy_target):
    """A function that plans an EAGLE-3 head on some accelerators."""
    greedy_target.model.config.save_pretrained(tmp_path)

    def plan(num_accelerators=1, **hardware):
        work = {"num_conversations": 1000, "mean_tokens": 40.0, "label_share": 0.5}
        config = {"target": {"name": str(tmp_path)}, "head": {"kind": "eagle3", "taps": [1, 2, 3]}, "workload": work}
        return make_plan(
            PlanHeadsConfig.model_validate(config | {"hardware": {"num_accelerators": num_accelerators} | hardware})
        )

    return plan


def sent_by_hand(num_numbers, n, passes):
    """Send a tensor round a ring, chunk by chunk; return the numbers that one of n processes sends."""
    chunk, sent = num_numbers // n, 0
    for _ in range(passes):
        for _ in range(n - 1):  # so many neighbours a chunk has to pass
            sent += chunk
    return sent


@pytest.mark.parametrize(("n", "passes"), [(1, 2), (2, 2), (8, 2), (8, 3), (64, 3)])
def test_the_bytes_of_a_ring_are_those_that_are_sent_by_hand(n, passes):
    assert ring_bytes(6400, n, passes) == pytest.approx(sent_by_hand(6400, n, passes))


def test_an_all_reduce_by_a_ring_adds_up_and_sends_that_many_numbers():
    n = 4
    tensors = [[float(10 * rank + place) for place in range(n)] for rank in range(n)]  # a chunk is one number
    total = [sum(column) for column in zip(*tensors, strict=True)]
    sent = [0] * n
    for step in range(2 * (n - 1)):
        moves = [(rank, (rank - step) % n, tensors[rank][(rank - step) % n]) for rank in range(n)]
        for rank, place, value in moves:
            neighbour = (rank + 1) % n
            tensors[neighbour][place] = tensors[neighbour][place] + value if step < n - 1 else value
            sent[rank] += 1
    assert tensors == [total] * n
    assert sent == [ring_bytes(n, n, 2)] * n


def named(name):
    (engine,) = [each for each in ENGINES if each.name == name]
    return engine


def test_each_stage_splits_one_part_more():
    def needed(name):
        return needed_bytes(MEMORY, named(name), 4, target_block=30)

    whole = sum(vars(MEMORY).values())
    assert needed("one_gpu") == whole
    assert needed("ddp_gpus") == whole + 400  # the buckets
    assert needed("zero1") == whole + 400 - 600
    assert needed("zero2") == whole + 400 - 600 - 300
    assert needed("zero3") == needed("fsdp2") == whole - 600 - 300 - 300
    assert needed("zero3 with the target split") == needed("zero3") - 750 + 2 * 30
    assert needed("zero3_offload") == needed("zero3") - 200 - 50  # the states, and half of each weight


def test_the_simplest_way_that_fits_is_taken_and_the_others_say_why_not(plan):
    roomy = plan(num_accelerators=4)
    assert roomy.fitting.engine.name == "ddp_gpus"
    assert plan().fitting.engine.name == "one_gpu"
    sizes = {fit.engine.name: fit.num_bytes for fit in roomy.fits}
    between = (sizes["zero1"] + sizes["zero2"]) / 2 / HEADROOM / GIBIBYTE
    tight = plan(num_accelerators=4, memory_gib=between)
    assert tight.fitting.engine.name == "zero2"
    complaints = {fit.engine.name: fit.complaint for fit in tight.fits}
    assert "one_gpu" not in complaints
    assert "the largest part that is not split is the draft's activations" in complaints["ddp_gpus"]
    assert complaints["zero1"] is not None
    assert plan(memory_gib=1e-6).fitting is None


def test_one_accelerator_sends_nothing_and_loses_nothing(plan):
    made = plan()
    rows = scale(made.config, made.models, made.memory, made.times, tokens_per_step=made.tokens_per_step, sizes=(1,))
    assert len(rows) == 4
    for row in rows:
        assert (row.sent_bytes, row.communication_seconds, row.efficiency_low, row.efficiency_high) == (0, 0, 1, 1)
        assert row.tokens_per_second_low == pytest.approx(made.tokens_per_second)


def test_more_accelerators_do_more_and_each_of_them_less(plan):
    rows = {(row.num_accelerators, row.engine, row.target): row for row in plan(preset="h100_80gb").scaled((8, 64, 1024))}
    assert len(rows) == 3 * 2 * 2
    for engine in (DDP, SPLIT):
        for target in (REPLICATED, SHARDED):
            for fewer, more in pairwise(rows[n, engine, target] for n in (8, 64, 1024)):
                assert more.tokens_per_second_low > fewer.tokens_per_second_low
                assert more.efficiency_low <= fewer.efficiency_low
    for row in rows.values():
        assert row.efficiency_low <= row.efficiency_high <= 1
        assert row.step_seconds_low <= row.step_seconds_high
    assert rows[64, SPLIT, REPLICATED].sent_bytes == pytest.approx(1.5 * rows[64, DDP, REPLICATED].sent_bytes)


def test_a_split_target_adds_its_own_bytes_once(plan):
    made = plan()
    rows = {(row.engine, row.target): row for row in made.scaled((8,))}
    more = rows[DDP, SHARDED].sent_bytes - rows[DDP, REPLICATED].sent_bytes
    assert more == pytest.approx(7 / 8 * made.memory.target_weights)
    assert made.memory.target_weights == 2 * sum(each.numel() for each in made.models.target.parameters())  # bfloat16


def test_what_does_not_fit_is_neither_scaled_nor_taken_for_the_pace(plan):
    roomy = plan(num_accelerators=8)
    split = min(fit.num_bytes for fit in roomy.fits if fit.engine.splits_target and not fit.engine.offloads_states)
    whole = min(fit.num_bytes for fit in roomy.fits if not fit.engine.splits_target)
    assert split < whole
    tight = plan(num_accelerators=8, memory_gib=(split + whole) / 2 / HEADROOM / GIBIBYTE)
    assert tight.fitting.engine.splits_target
    assert {row.target for row in tight.scaled((8,))} == {SHARDED}
    assert tight.step_seconds in [row.step_seconds_high for row in tight.scaled((8,))]
    assert tight.step_seconds > roomy.step_seconds
