"""Memory by every way of sharing it out, and which way a plan takes."""

import copy
import dataclasses

import pytest

from configs.schema.commands.planning import PlanHeadsConfig
from train.plan.memory import ENGINES, GIBIBYTE, HEADROOM, SPREADING, Memory, Sharing, needed_bytes
from train.plan.plan import make_plan

MEMORY = Memory(
    target_weights=1000,
    draft_weights=400,
    draft_casts=200,
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

    def plan(num_accelerators=1, num_blocks=3, **hardware):
        model = copy.deepcopy(greedy_target.model.config)
        model.num_hidden_layers = num_blocks
        model.save_pretrained(tmp_path)
        work = {"num_conversations": 1000, "mean_tokens": 40.0, "label_share": 0.5}
        config = {"target": {"name": str(tmp_path)}, "head": {"kind": "eagle3", "taps": [1, 2, 3]}, "workload": work}
        config |= {"data": {"max_length": 64}}
        return make_plan(
            PlanHeadsConfig.model_validate(config | {"hardware": {"num_accelerators": num_accelerators} | hardware})
        )

    return plan


def named(name):
    (engine,) = [each for each in (*ENGINES, SPREADING) if each.name == name]
    return engine


def test_each_stage_splits_one_part_more():
    def needed(name, **kind):
        return needed_bytes(MEMORY, named(name), 4, target_block=30, **kind)

    whole = sum(vars(MEMORY).values())
    assert needed("one_gpu") == needed("ddp_gpus") == whole
    assert needed("zero2") == whole - 600 - 300
    assert needed("one_gpu with target.device_map") == whole - 750 + 30
    assert needed("fsdp2", head=True) == whole - 600  # gathers a head's weights and gradients as a whole
    # What a step takes is less than the two whole drafts that are there at the start.
    assert needed("zero3") == needed("fsdp2") == needed("zero3_offload") == 1000 + 2 * 400 + 10
    long = dataclasses.replace(MEMORY, draft_activations=5000)
    assert needed_bytes(long, named("fsdp2"), 4, target_block=30) == whole + 4950 - 600 - 300 - 300 - 150


def test_processes_of_a_group_hold_their_part_of_the_blocks_and_all_of_the_rest():
    needed = needed_bytes(MEMORY, Sharing(recipe="ddp_gpus", group=4), 8, target_block=30, target_outside=200)
    assert needed == sum(vars(MEMORY).values()) - 1000 + (200 + 800 / 4) + 30


def test_the_simplest_way_that_fits_is_taken_and_the_others_say_why_not(plan):
    roomy = plan(num_accelerators=4)
    assert roomy.fitting.engine.name == "ddp_gpus"
    assert plan().fitting.engine.name == "one_gpu"
    sizes = {fit.engine.name: fit.num_bytes for fit in roomy.fits}
    between = (sizes["ddp_gpus"] + sizes["zero2"]) / 2 / HEADROOM / GIBIBYTE
    tight = plan(num_accelerators=4, memory_gib=between)
    assert tight.fitting.engine.name == "zero2"
    complaints = {fit.engine.name: fit.complaint for fit in tight.fits}
    assert "one_gpu" not in complaints
    assert complaints["ddp_gpus"] == f"more than {between * HEADROOM:.1f} GiB"
    assert plan(memory_gib=1e-6).fitting is None


def test_one_process_with_a_spread_target_takes_the_steps_of_one(plan):
    roomy = plan(num_accelerators=8, num_blocks=16)
    spread = dataclasses.replace(roomy, fits=[fit for fit in roomy.fits if fit.engine.spreads_target])
    assert spread.num_processes == 1
    assert spread.steps == plan(num_accelerators=1, num_blocks=16).steps > roomy.steps
    assert spread.hours == pytest.approx(spread.steps / roomy.steps * roomy.hours)
