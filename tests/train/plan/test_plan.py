"""Plans against what they plan: parameters and cache bytes of real tiny models; memory by each way of sharing it out."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from configs.schema.commands.planning import PlanDistillConfig, PlanHeadsConfig
from configs.schema.training import StudentConfig
from distill.student.init import initial_draft, keep_layers
from heads.inference.causal_lm import read_documents
from tests.support.family_configs import tiny_model
from tests.support.tiny_heads import HEADS
from tests.support.training_runs import kept_bytes
from train.plan.models import count, frozen_copies, plan_models
from train.plan.plan import GIBIBYTE, HEADROOM, make_plan

WORK = {"num_conversations": 1000, "mean_tokens": 40.0, "label_share": 0.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, greedy_target):
    """A folder with nothing of the target but its config."""
    folder = tmp_path_factory.mktemp("planned")
    greedy_target.model.config.save_pretrained(folder)
    return folder


def heads(folder, kind, **settings):
    config = {"target": {"name": str(folder), "dtype": "float32"}, "head": HEADS[kind] | settings.pop("head", {})}
    return PlanHeadsConfig.model_validate(config | {"schedule": {"mixed_precision": "no"}} | settings)


def distilled(folder, **settings):
    config = {"target": {"name": str(folder), "dtype": "float32"}, "schedule": {"mixed_precision": "no"}}
    return PlanDistillConfig.model_validate(config | settings)


@pytest.mark.parametrize("kind", HEADS)
def test_a_heads_parameters_are_those_that_training_has(folder, head_task, kind):
    models = plan_models(heads(folder, kind))
    task = head_task(kind)
    assert count(models.draft, trained=True) == sum(each.numel() for each in task.module.parameters() if each.requires_grad)
    assert frozen_copies(models.draft) == sum(each.numel() for each in task.module.buffers() if each.is_floating_point())
    assert count(models.target) == sum(each.numel() for each in task.target.model.parameters())
    assert models.taps == tuple(task.taps)


@pytest.mark.parametrize(
    "student",
    [
        {"layers": [0], "train_embeddings": True},
        {"init": "fresh", "overrides": {"num_hidden_layers": 1, "hidden_size": 16}},
        {"layers": [0, 1], "lora": {"rank": 4}},
    ],
)
def test_a_draft_lms_parameters_are_those_that_training_has(folder, greedy_target, student):
    models = plan_models(distilled(folder, student=student))
    draft = initial_draft(StudentConfig.model_validate(student), greedy_target)
    assert count(models.draft) == sum(each.numel() for each in draft.parameters())
    assert count(models.draft, trained=True) == sum(each.numel() for each in draft.parameters() if each.requires_grad)


def test_the_bytes_of_a_cache_are_those_that_are_written(folder, tmp_path, greedy_rows, make_cache):
    cache = make_cache(greedy_rows, max_length=20, taps=[0, 1, 2])
    plan = make_plan(
        heads(folder, "eagle3", head={"taps": [0, 1, 2]}, data={"train": str(tmp_path / "train.jsonl"), "max_length": 20})
    )
    tensors = [tensor for shard in cache.glob("shard-*.safetensors") for tensor in load_file(shard).values()]
    assert plan.cache_row_bytes * plan.cache_rows == sum(tensor.nbytes for tensor in tensors)


def planned(folder, **settings):
    return make_plan(heads(folder, "eagle3", workload=WORK, **settings))


def test_a_packed_row_is_counted_whole(folder):
    data = {"max_length": 100, "packing": True}
    packed, padded = (planned(folder, data=each) for each in (data, {"max_length": 100}))
    assert packed.memory["target activations"] == 4 * padded.memory["target activations"]
    # A block head has anchors in each conversation of a row.
    work = WORK | {"mean_tokens": 100.0}
    packed, padded = (make_plan(heads(folder, "dflash", workload=work, data=each)) for each in (data, {"max_length": 100}))
    assert packed.memory["draft activations"] == pytest.approx(4 * padded.memory["draft activations"], rel=1e-6)


def test_masks_of_all_pairs_are_counted_where_a_step_has_them(folder, greedy_target):
    """What a packed step keeps beyond a step of one document is, but for the tokens' positions, its masks."""
    data, batch = {"max_length": 128, "pack_length": 512, "packing": True}, torch.arange(512).unsqueeze(0) % 64
    settings = {"data": data, "schedule": {"batch_size": 1, "mixed_precision": "no"}, "workload": WORK}
    plan = make_plan(distilled(folder, student={"layers": [0, 1]}, **settings))
    draft = keep_layers(greedy_target.model, [0, 1]).float().train().requires_grad_(True)
    positions = torch.arange(512).unsqueeze(0) % 128
    packed, whole = (kept_bytes(lambda each=each: read_documents(draft, batch, each)) for each in (positions, None))
    assert plan.memory["attention masks"] == pytest.approx(packed - whole, rel=0.15)

    def of_heads(kind, **changes):
        return make_plan(heads(folder, kind, **settings | changes)).memory["attention masks"]

    long = {"data": {"max_length": 2048, "pack_length": 8192, "packing": True}}
    assert of_heads("eagle3") == 512**2 * 5
    assert of_heads("eagle3", **long) == 0  # on a CPU the target reads a document at a time
    assert of_heads("eagle3", **long, hardware={"preset": "h100_80gb"}) == 8192**2 * 5
    assert of_heads("mtp", data={"max_length": 512}) == 512**2 * 5 * (2 + 3)


@pytest.mark.parametrize("name", ["gemma4_text", "deepseek_v3", "jamba", "mamba2"])
def test_a_target_of_any_family_is_planned(tmp_path, name):
    model = tiny_model(name)
    model.config.save_pretrained(tmp_path)
    settings = {"data": {"max_length": 12}, "workload": WORK}
    assert count(make_plan(heads(tmp_path, "eagle3", **settings)).models.target) == count(model)
    distillation = make_plan(distilled(tmp_path, student={"layers": [0, 1]}, **settings))
    assert count(distillation.models.draft) == count(keep_layers(model, [0, 1]))


@pytest.fixture
def planned_head(tmp_path, greedy_target):
    """A function that plans an EAGLE-3 head on some accelerators."""

    def plan(num_accelerators=1, **hardware):
        greedy_target.model.config.save_pretrained(tmp_path)
        config = {"target": {"name": str(tmp_path)}, "head": {"kind": "eagle3", "taps": [1, 2, 3]}, "workload": WORK}
        config |= {"data": {"max_length": 64}}
        return make_plan(
            PlanHeadsConfig.model_validate(config | {"hardware": {"num_accelerators": num_accelerators} | hardware})
        )

    return plan


def sizes_of(plan):
    return {fit.engine.name: fit.num_bytes for fit in plan.fits}


def test_each_way_splits_what_it_splits(planned_head):
    memory, sizes = (plan := planned_head(num_accelerators=4)).memory, sizes_of(plan)
    whole, states, gradients = sum(memory.values()), memory["optimizer states"], memory["gradients"]
    assert sizes["ddp_gpus"] == sizes_of(planned_head())["one_gpu"] == whole
    assert states == 2 * gradients == 8 * count(plan.models.draft, trained=True)  # AdamW's two, in float32
    decode, layers = plan.config.held_out.decode, plan.models.target.model.layers
    tokens = min(decode.batch_size, plan.config.held_out.num_prompts) * (64 + decode.max_new_tokens)
    written = sum(each.self_attn.k_proj.out_features + each.self_attn.v_proj.out_features for each in layers)
    assert memory["held-out keys and values"] == tokens * written * plan.models.target.dtype.itemsize
    assert sizes["zero2"] == whole - 3 / 4 * (states + gradients)
    assert sizes["fsdp2"] == whole - 3 / 4 * states  # gathers a head's weights and gradients as a whole
    blocks = [sum(each.nbytes for each in block.parameters()) for block in plan.models.target.model.layers]
    largest = max(*blocks, plan.models.target.lm_head.weight.nbytes)
    assert sizes["one_gpu with target.device_map"] == whole - 3 / 4 * memory["target weights"] + largest
    assert sizes["ddp_gpus with target.shards=2"] == whole - sum(blocks) / 2 + largest


def test_a_draft_lm_is_split_too_and_whole_at_the_start(folder):
    settings = {"workload": WORK, "hardware": {"num_accelerators": 4}, "student": {"layers": [0]}}
    memory, sizes = (plan := make_plan(distilled(folder, **settings))).memory, sizes_of(plan)
    split = sum(memory[name] for name in ("optimizer states", "gradients", "draft weights", "draft casts"))
    assert sizes["fsdp2"] == sizes["zero3"] == sum(memory.values()) - 3 / 4 * split
    assert sizes["zero3_offload"] < sizes["zero3"]
    short = make_plan(distilled(folder, **settings, data={"max_length": 1}, schedule={"batch_size": 1}))
    weights = 2 * memory["draft weights"] + memory["frozen draft"] + memory["target weights"]
    assert sizes_of(short)["zero3_offload"] >= weights


def test_the_simplest_way_that_fits_is_taken_and_the_others_say_why_not(planned_head):
    roomy = planned_head(num_accelerators=4)
    assert roomy.fitting.engine.name == "ddp_gpus"
    assert planned_head().fitting.engine.name == "one_gpu"
    sizes = sizes_of(roomy)
    between = (sizes["ddp_gpus"] + sizes["zero2"]) / 2 / HEADROOM / GIBIBYTE
    tight = planned_head(num_accelerators=4, memory_gib=between)
    assert tight.fitting.engine.name == "zero2"
    complaints = {fit.engine.name: fit.complaint for fit in tight.fits}
    assert "one_gpu" not in complaints
    assert complaints["ddp_gpus"] == f"more than {between * HEADROOM:.1f} GiB"
    assert planned_head(memory_gib=1e-6).fitting is None


def test_one_process_trains_on_a_spread_target(planned_head):
    roomy = planned_head(num_accelerators=8)
    spread = dataclasses.replace(roomy, fits=[fit for fit in roomy.fits if fit.engine.spreads_target])
    assert (roomy.num_processes, spread.num_processes) == (8, 1)
