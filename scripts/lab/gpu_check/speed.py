"""How fast a device decodes and trains: beside transformers' generation, and beside the plan of memory and time.

B batch, T positions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice

import torch
from transformers import GenerationConfig

from configs.schema.base import Value
from configs.schema.commands.planning import PlanHeadsConfig
from configs.schema.decoding import DecodeConfig
from configs.schema.training import HeadsConfig
from distill.dataset.batches import Example, collate
from distill.dataset.conversations import Conversation
from eval.decoder.decode import Request, decode
from heads.artifact import load_draft
from heads.device import allocated_peak, has_graphs, synchronize
from heads.frozen.loading import Target
from heads.modules.interface import Batch
from heads.proposers.protocol import Proposer
from scripts.lab.bench.turns import speed_ratio, take_turns
from scripts.lab.gpu_check.page import Line, absent, held
from scripts.lab.gpu_check.setup import Setup
from scripts.lab.trained_runs import load_changed
from train.launch import make_accelerator
from train.loop.checkpoints import Progress
from train.loop.engines import make_optimizer
from train.plan.memory import GIBIBYTE
from train.plan.plan import Plan, make_plan
from train.resolve import resolve
from train.tasks.head import HeadTask

RECIPE = "configs/heads/eagle3.yaml"
WARM_UP = 3  # steps that are not timed
MEMORY_OVER, MEMORY_UNDER = 1.15, 0.5  # of the plan: fragments come on top, buffers of moments that never meet do not
LEAST_SPEED = 0.9  # of plain decoding, lean or compiled, beside the fastest generation of transformers
SAMPLES = 1000  # of the bootstrap
TERAFLOP = 1e12

# --- training -------------------------------------------------------------------------------------------------------


def train_head(setup: Setup) -> Iterator[Line]:
    """Train a head for a few steps on the target's own answers to the prompts, and keep it as an artifact."""
    settings = DecodeConfig(num_speculative_tokens=0, max_new_tokens=setup.config.max_new_tokens)
    answers, _ = decode(setup.target, setup.requests, settings)
    rows = [_conversation(each.prompt_id, each.prompt_tokens, each.tokens) for each in answers]
    task = _task(setup, rows, setup.artifact.parent)
    examples = [Example(row.prompt_ids + row.answer_ids, len(row.prompt_ids)) for row in rows]
    size = task.config.schedule.batch_size
    batches = cycle([collate(examples[start : start + size]) for start in range(0, len(examples), size)])
    losses = _train(task, list(islice(batches, setup.config.training_steps)))
    task.save(task.module, Progress(step=len(losses)), {})
    first, last = losses[0], losses[-1]
    yield held("training", f"loss of {len(losses)} steps", f"{first:.3f}, then {last:.3f}", "falls", last < first)


def time_training(setup: Setup, tflops: float) -> Iterator[Line | float]:
    """Time steps on long random rows; yield lines, and the share of the measured `tflops` that a step reaches."""
    config, V = setup.config, setup.target.vocab_size
    ids_BT = torch.randint(V, (config.batch_size, config.row_tokens), generator=torch.Generator().manual_seed(0))
    start = config.row_tokens // 8
    batch = collate([Example(tuple(row), start) for row in ids_BT.tolist()])
    rows = [_conversation("random", row[:start], row[start:]) for row in ids_BT.tolist()]
    task = _task(setup, rows, setup.artifact.parent.with_name("timed"))
    plan = _plan(task.config, batch)
    _train(task, [batch] * WARM_UP)
    if not setup.is_cpu and allocated_peak(setup.device) is not None:
        torch.accelerator.reset_peak_memory_stats(setup.device)
    synchronize(setup.device)
    started = time.perf_counter()
    _train(task, [batch] * config.timed_steps)
    synchronize(setup.device)
    rate = config.timed_steps * ids_BT.numel() / (time.perf_counter() - started)
    share = plan.flops.total * rate / (tflops * TERAFLOP)
    shape = f"EAGLE-3, {config.batch_size} rows of {config.row_tokens}, {task.config.schedule.mixed_precision}"
    yield Line(part="training", what=shape, found=f"{rate:,.0f} tokens/s, {100 * share:.1f} % of {tflops:.3g} TFLOP/s")
    yield share
    peak = allocated_peak(setup.device)
    if peak is None:
        yield absent("training", "memory beside the plan", "torch does not count this device's memory")
        return
    planned = plan.fits[0].num_bytes - plan.memory.held_out_kv
    told = f"{peak / GIBIBYTE:.2f} GiB, planned {planned / GIBIBYTE:.2f}"
    is_so = MEMORY_UNDER <= peak / planned <= MEMORY_OVER
    yield held("training", "memory beside the plan", told, f"{MEMORY_UNDER} to {MEMORY_OVER} of the plan", is_so)


def _task(setup: Setup, rows: Sequence[Conversation], output: object) -> HeadTask:
    changes: dict[str, Value] = {
        "target.name": setup.config.target,
        "target.dtype": setup.dtype,
        "schedule.batch_size": setup.config.batch_size,
        "schedule.trackers": [],
        "held_out.num_prompts": 1,
        "held_out.decode.max_new_tokens": 1,
        "data.max_length": max(len(row.prompt_ids) + len(row.answer_ids) for row in rows),
        "output": str(output),
    }
    recipe = load_changed(HeadsConfig, RECIPE, changes, "gpu_check")
    accelerator = make_accelerator(recipe.schedule, setup.artifact.parent)
    return HeadTask(resolve(recipe, setup.target.model, rows), setup.target, rows, rows[:1], accelerator)


def _plan(config: HeadsConfig, batch: Batch) -> Plan:
    size, length = batch.input_ids_BT.shape
    share = float(batch.loss_mask_BT.float().mean())
    work = {"num_conversations": size, "mean_tokens": float(length), "label_share": share}
    return make_plan(PlanHeadsConfig.model_validate(config.model_dump(mode="json") | {"workload": work}))


def _train(task: HeadTask, batches: Sequence[Batch]) -> list[float]:
    """Run an optimiser step over each batch; return their losses."""
    device, module = task.target.device, task.module
    module.to(device)
    optimizer, scheduler = make_optimizer(module, task.config.optimizer, len(batches))
    dtype = task.config.schedule.mixed_precision
    losses = []
    for batch in batches:
        on_device = batch.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16"):
            labels = on_device.loss_mask_BT[:, 1:].sum()
            loss = task.loss(module, on_device, task.source.read(on_device)).loss / labels
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), task.config.optimizer.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def _conversation(prompt_id: str, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Conversation:
    return Conversation(
        prompt_id=prompt_id,
        category="",
        turn=0,
        messages=(),
        prompt_ids=tuple(prompt_ids),
        answer_ids=tuple(answer_ids),
        ended=False,
    )


# --- decoding -------------------------------------------------------------------------------------------------------


def time_decoding(setup: Setup) -> Iterator[Line]:
    """Time plain decoding and the trained head by every forward, and transformers' generation, in turns."""
    graphs = has_graphs(setup.device)
    peer = setup.load(setup.dtype, setup.device_name)
    peer.model.requires_grad_(
        True
    )  # as transformers leaves it: on a CPU its head takes twenty times as long with frozen weights
    sides: dict[str, Callable[[Request, int], int]] = {"generate": partial(_generate, setup, peer, False)}
    if graphs:
        sides["generate, static cache"] = partial(_generate, setup, peer, True)
    for forward in ("transformers", "lean", *(["compiled"] if graphs else [])):
        target = setup.load(setup.dtype, setup.device_name, forward)
        draft = load_draft(setup.artifact, target.identity, target.model)
        sides[f"plain, {forward}"] = partial(_decode, setup, target, None)
        sides[f"eagle3, {forward}"] = partial(_decode, setup, target, draft.proposer)
    for side in sides.values():  # each graph of a side is recorded before any is timed
        for request in setup.requests[:2]:
            side(request, 0)
    turns = take_turns(sides, setup.requests[:8], 2, description="timing decoding")
    theirs = "generate, static cache" if graphs else "generate"
    for name in sides:
        if name.startswith("generate"):
            continue
        is_plain = name.startswith("plain")
        other = theirs if is_plain else name.replace("eagle3", "plain")
        ratio = speed_ratio(turns[name], turns[other], float, samples=SAMPLES)
        told = f"{ratio.point:.2f} times [{ratio.low:.2f}, {ratio.high:.2f}] the tokens/s of {other}"
        if is_plain and name != "plain, transformers":
            yield held("decoding", name, told, f"at least {LEAST_SPEED:g}", (ratio.point or 0) >= LEAST_SPEED)
        else:
            yield Line(part="decoding", what=name, found=told)
    if not graphs:
        yield absent("decoding", "compiled, with CUDA graphs", "no CUDA device")


def _decode(setup: Setup, target: Target, proposer: Proposer | None, request: Request, repeat: int) -> int:
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=setup.config.max_new_tokens)
    answers, _ = decode(target, [request], config, proposer, repeat=repeat)
    return len(answers[0].tokens)


def _generate(setup: Setup, target: Target, static: bool, request: Request, repeat: int) -> int:
    """Let transformers answer; with a static cache it compiles the forward by itself."""
    eos = list(target.eos_token_ids) or None
    length = setup.config.max_new_tokens
    config = GenerationConfig(
        max_new_tokens=length,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=eos[0] if eos else 0,
        cache_implementation="static" if static else None,
    )
    ids_1T = torch.tensor([request.tokens], device=target.device)
    with torch.inference_mode():
        output_1T = target.model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), generation_config=config)  # type: ignore[operator]
    return int(output_1T.shape[1]) - ids_1T.shape[1]
