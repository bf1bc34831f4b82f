"""What this machine's accelerator does, beside the plan and transformers: the second half of `make gpu-check`.

The first half, `pytest -m gpu`, holds losses, tokens and artifacts to the CPU's. This one measures a product and a copy, trains
an EAGLE-3 head and decodes with it by every forward, by the commands a person would give.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from configs.runtime.command import DONE, GATE_FAILED, run_command
from configs.schema.base import Dtype, PositiveFloat, PositiveInt, Settings
from heads.device import default_device, synchronize
from scripts.bench.harness import evaluate, run_config, write_results
from train.loop.telemetry import METRICS_FILE, read_lines

log = logging.getLogger("draftsmith")

REPEATS = 5


class GpuBenchConfig(Settings):
    """`python -m scripts.bench.gpu`: what is trained and decoded to measure the device."""

    target: str = "embedded:smollm2-135m-instruct"
    prompts: str = "eval/suites/house64.jsonl"
    num_prompts: PositiveInt = 64
    max_new_tokens: PositiveInt = 64
    dtype: Dtype = "bfloat16"
    training_steps: PositiveInt = 100
    batch_size: PositiveInt = 8
    least_speed: PositiveFloat = 0.9  # of plain decoding beside that by transformers' forward
    output: str = "runs/gpu_check"


def measure_device(config: GpuBenchConfig) -> int:
    folder, device = Path(config.output), default_device()
    rates = measure_rates(device, getattr(torch, config.dtype))
    rows: list[dict[str, Any]] = [{"what": name, "value": value} for name, value in rates.items()]
    target = {"name": config.target, "dtype": config.dtype, "device": str(device)}
    prompts = {"source": "file", "path": config.prompts, "num_prompts": config.num_prompts}
    answers = {"max_new_tokens": config.max_new_tokens, "batch_size": 64}
    run_config(
        "scripts.data", folder / "data", {"target": target, "prompts": prompts, "answers": answers, "held_out_share": 0.2}
    )
    schedule = {"batch_size": config.batch_size, "max_steps": config.training_steps, "trackers": [], "resume": False}
    schedule |= {"log_every_steps": max(1, config.training_steps // 2)}
    files = {name: str(folder / "data" / f"{name}.jsonl") for name in ("train", "held_out")}
    recipe = {"target": target, "data": files, "head": {"kind": "eagle3"}, "schedule": schedule, "sanity": {"enabled": False}}
    run_config("train.heads", folder / "head", recipe)
    last = [row for row in read_lines(folder / "head" / METRICS_FILE) if "tokens_per_second" in row][-1]
    names = ("tokens_per_second", "model_tflops_per_second")
    rows += [{"what": f"training: {name}", "value": last[name]} for name in names]
    slow, paces = [], dict[str, float]()
    shared = {"draft": str(folder / "head" / "artifact"), "suite": {"path": config.prompts, "num_prompts": 16}}
    shared |= {"decode": {"max_new_tokens": config.max_new_tokens}, "baselines": []}
    for forward in ("transformers", "lean"):
        speed = evaluate(folder / forward, shared | {"target": target | {"forward": forward}})["speed"]
        paces[forward] = speed["milliseconds_per_token_autoregressive"]
        beside = paces["transformers"] / paces[forward]
        rows.append({"what": f"plain decoding, {forward}: times the speed by transformers' forward", "value": beside})
        rows.append({"what": f"decoding with the head, {forward}: speedup", "value": speed["decode_speedup"]})
        if beside < config.least_speed:
            slow.append(f"plain decoding by the {forward} forward has {beside:.2f} times the speed of transformers'")
    for row in rows:
        log.info("%(what)s %(value).4g", row)
    measured = rates | {"utilisation": last["model_tflops_per_second"] / rates["tflops"]}
    write_results(folder / "gpu-check.json", "gpu_check", rows=rows, ratios={}, config=config, measured=measured)
    for each in slow:
        log.error("%s", each)
    return GATE_FAILED if slow else DONE


def measure_rates(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Time a large product and a large copy, of each the fastest of some repeats."""
    size, count = (1024, 2**26) if device.type == "cpu" else (8192, 2**30)
    one = torch.randn(size, size, device=device).to(dtype)
    bytes_N = torch.zeros(count, dtype=torch.uint8, device=device)
    product, copy = _fastest(device, lambda: one @ one), _fastest(device, bytes_N.clone)
    return {"tflops": 2 * size**3 / product / 1e12, "memory_gb_per_second": 2 * count / copy / 1e9}


def _fastest(device: torch.device, work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 1):  # the first one warms up
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)


if __name__ == "__main__":
    sys.exit(run_command(GpuBenchConfig, measure_device, description=__doc__))
