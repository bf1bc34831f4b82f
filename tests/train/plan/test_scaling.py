"""Shares of memory and of traffic: against rings sent by hand, and identities that hold for any recipe."""

import copy
import math
from itertools import pairwise

import pytest

from configs.schema.commands.planning import PlanHeadsConfig
from train.plan.memory import ENGINES, GIBIBYTE, HEADROOM, SPREADING, Memory, Sharing, needed_bytes
from train.plan.page import plan_page
from train.plan.plan import make_plan
from train.plan.scaling import DDP, ONE_A_NODE, REPLICATED, SPLIT, SPREAD, ZERO2, passes_of, ring_bytes, scale

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

    def plan(num_accelerators=1, num_blocks=3, data=None, **hardware):
        model = copy.deepcopy(greedy_target.model.config)
        model.num_hidden_layers = num_blocks
        model.save_pretrained(tmp_path)
        work = {"num_conversations": 1000, "mean_tokens": 40.0, "label_share": 0.5}
        config = {"target": {"name": str(tmp_path)}, "head": {"kind": "eagle3", "taps": [1, 2, 3]}, "workload": work}
        config |= {"data": data or {}}
        return make_plan(
            PlanHeadsConfig.model_validate(config | {"hardware": {"num_accelerators": num_accelerators} | hardware})
        )

    return plan


@pytest.mark.parametrize("n", [1, 2, 5])
def test_an_all_reduce_by_a_ring_adds_up_and_sends_that_many_numbers(n):
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
    (engine,) = [each for each in (*ENGINES, *SPREADING) if each.name == name]
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
    assert needed("one_gpu --gpu_ids all with target.device_map") == whole - 750 + 30  # one process: no buckets
    assert needed("zero3_offload") == needed("zero3") - 200 - 50  # the states, and half of each weight


def test_processes_of_several_nodes_share_gradients_and_each_spreads_its_target():
    engine = named("ddp_gpus with target.device_map")
    needed = needed_bytes(MEMORY, engine, 16, target_block=30, accelerators_per_node=4)
    assert needed == sum(vars(MEMORY).values()) - 750 + 30 + 400


def test_processes_of_a_group_hold_their_part_of_the_blocks_and_all_of_the_rest():
    for kind, while_it_runs in (("tensor", 0), ("shard", 30)):
        engine = Sharing(recipe="ddp_gpus", group=4, kind=kind)
        needed = needed_bytes(MEMORY, engine, 8, target_block=30, target_outside=200)
        assert needed == sum(vars(MEMORY).values()) - 1000 + (200 + 800 / 4) + while_it_runs + 400


def test_a_group_sums_states_twice_a_block_or_gathers_its_weights(plan):
    made = plan(num_accelerators=4)
    groups = [Sharing(recipe="ddp_gpus", group=2, kind=kind) for kind in ("tensor", "shard")]
    rows = scale(made.config, made.models, made.times, tokens_per_step=made.tokens_per_step, n=4, groups=groups)
    sent = {row.target: row.sent_bytes for row in rows if row.engine == DDP}
    model, config = made.models.target, made.config
    row = config.data.row_length or config.data.max_length
    state = config.schedule.batch_size * row * model.config.hidden_size * model.dtype.itemsize
    layers = model.model.layers
    sums = 2 * len(layers) * 2  # of attention and MLP, in each block, for the micro-batches of two processes
    assert sent["tensor 2"] - sent[REPLICATED] == pytest.approx(sums * state)  # a ring of two sends half of it twice
    weights = sum(each.numel() * each.element_size() for each in layers.parameters())
    assert sent["shard 2"] - sent[REPLICATED] == pytest.approx(weights / 2)


def test_a_heads_weights_stay_whole_and_under_fsdp2_its_gradients_too():
    def needed(name, **kind):
        return needed_bytes(MEMORY, named(name), 4, target_block=30, **kind)

    assert needed("zero3", head=True) == needed("zero3") + 300
    assert needed("fsdp2", head=True) == needed("fsdp2") + 300 + 300
    assert needed("zero3_offload", head=True) == needed("zero3_offload") + 150
    for name in ("one_gpu", "ddp_gpus", "zero1", "zero2"):
        assert needed(name, head=True) == needed(name)


def passes_by_hand(engine, num_micro_batches, head):
    """Go through a step; count the times that all weights or all gradients go round the ring."""
    passes = 0
    for number in range(num_micro_batches):
        if engine == SPLIT:
            passes += 1 if head else 2  # weights before the forward, and again before the backward where they were let go
        if engine == ZERO2 or (engine == SPLIT and not head) or number == num_micro_batches - 1:
            passes += 1  # reduce-scatter of gradients
    return passes + (engine != SPLIT)  # new weights, or the other half of an all-reduce


@pytest.mark.parametrize("engine", [DDP, ZERO2, SPLIT])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 8])
def test_engines_that_split_gradients_send_with_every_micro_batch(engine, head, num_micro_batches):
    assert passes_of(engine, num_micro_batches, head=head) == passes_by_hand(engine, num_micro_batches, head)


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


def test_servers_are_as_many_as_train_fastest_and_a_step_takes_as_long_as_the_slower_side(plan):
    made = plan(num_accelerators=8, num_blocks=16, preset="h100_80gb")
    tokens, rate = made.tokens_per_step, 989e12 * made.config.hardware.utilisation
    own = made.flops.total - made.flops.target_forward
    states = 4 * 32 * 2  # bytes a token: three taps and the last state

    def step(servers):
        trainers = 8 - servers
        sent = (
            ring_bytes(made.memory.gradients, trainers, 2) / 450e9 + (trainers > 1) * 2 * math.ceil(math.log2(trainers)) * 20e-6
        )
        training = own * tokens / rate + made.times.optimizer + states * tokens / 2e9 + sent
        return max(training, trainers * tokens * made.flops.target_forward / (servers * rate))

    best = max(range(1, 8), key=lambda servers: (8 - servers) / step(servers))
    (way,) = [way for way in made.ways if way.fit.engine.servers]
    assert (way.fit.engine.servers, way.fit.engine.server_size) == (best, 1)
    assert way.row.step_seconds_high == pytest.approx(step(best))
    assert way.row.tokens_per_second_low == pytest.approx((8 - best) * tokens / step(best))
    assert way.steps == math.ceil(1000 / ((8 - best) * made.conversations_per_step))
    assert made.fastest.row.tokens_per_second_low == max(each.row.tokens_per_second_low for each in made.ways)
    assert plan(num_accelerators=8, data={"cache": "runs/cache"}).serving(8) is None
    assert plan(num_accelerators=1).serving(1) is None


def test_one_accelerator_sends_nothing_and_loses_nothing(plan):
    made = plan()
    rows = scale(made.config, made.models, made.times, tokens_per_step=made.tokens_per_step, n=1)
    assert len(rows) == 4
    for row in rows:
        assert (row.sent_bytes, row.communication_seconds, row.efficiency_low, row.efficiency_high) == (0, 0, 1, 1)
        assert row.tokens_per_second_low == pytest.approx(made.tokens_per_second)


def test_more_accelerators_do_more_and_each_of_them_less(plan):
    rows = {(row.num_accelerators, row.engine, row.target): row for row in plan(preset="h100_80gb").scaled((8, 64, 1024))}
    ways = [*((engine, REPLICATED) for engine in (DDP, ZERO2, SPLIT)), (DDP, "tensor 2"), (ONE_A_NODE, SPREAD)]
    served = {key for key in rows if key[2].startswith("states of")}
    assert rows.keys() - served == {(n, *way) for n in (8, 64, 1024) for way in ways}
    assert sorted(n for n, *_ in served) == [8, 64, 1024]
    for way in ways:
        for fewer, more in pairwise(rows[n, *way] for n in (8, 64, 1024)):
            assert more.tokens_per_second_low > fewer.tokens_per_second_low
            assert more.efficiency_low <= fewer.efficiency_low
    for row in rows.values():
        assert row.efficiency_low <= row.efficiency_high <= 1
        assert row.step_seconds_low <= row.step_seconds_high


@pytest.mark.parametrize("pack_length", [None, 250])
def test_a_node_with_a_spread_target_does_the_work_of_one_accelerator_and_hands_states_on(plan, pack_length):
    made = plan(data={"max_length": 100, "packing": pack_length and True, "pack_length": pack_length})
    row = next(row for row in made.scaled((8,)) if row.target == SPREAD)
    state = made.config.schedule.batch_size * (pack_length or 100) * 32 * 2  # bfloat16
    assert row.sent_bytes == (8 + 3) * state / 8  # to the next and home again, and three taps home
    assert row.efficiency_low == pytest.approx(made.times.total / row.step_seconds_high / 8)
    assert row.tokens_per_second_low == pytest.approx(made.tokens_per_step / row.step_seconds_high)
    assert row.step_seconds_high == pytest.approx(made.times.total + row.communication_seconds)


def test_what_does_not_fit_is_neither_scaled_nor_taken_for_the_pace(plan):
    roomy = plan(num_accelerators=8, num_blocks=16)  # a target beside which the draft is small
    spread = min(fit.num_bytes for fit in roomy.fits if fit.engine.spreads_target)
    whole = min(fit.num_bytes for fit in roomy.fits if not (fit.engine.spreads_target or fit.engine.servers))
    assert spread < whole
    tight = plan(num_accelerators=8, num_blocks=16, memory_gib=(spread + whole) / 2 / HEADROOM / GIBIBYTE)
    assert tight.tokens_per_second == pytest.approx(tight.scaled((8,))[0].tokens_per_second_low)
    assert tight.steps == plan(num_accelerators=1, num_blocks=16).steps
    assert tight.fitting.engine.spreads_target
    assert {row.target for row in tight.scaled((8,)) if not row.target.startswith("states of")} == {SPREAD}
    assert tight.step_seconds in [row.step_seconds_high for row in tight.scaled((8,))]
    assert tight.step_seconds > roomy.step_seconds
    page = plan_page(tight.config, with_scaling=False)
    assert f" s for {tight.tokens_per_step:,.0f} tokens at " in page  # one process takes a step, not eight
    assert f"{tight.steps} steps, 1 epochs: " in page
