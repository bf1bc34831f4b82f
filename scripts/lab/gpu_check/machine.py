"""What the machine can do, and what the code starts on it: rates, kernels and copies of a round, processes side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import profile, supported_activities

from heads.device import has_graphs, synchronize
from scripts.lab.bench.engines import compare_engines
from scripts.lab.counts.launches import Launches, run_under_way, tiny_target
from scripts.lab.gpu_check.page import Line, absent, held
from scripts.lab.gpu_check.setup import Setup
from scripts.lab.settings import EngineComparisonSettings

KERNELS_OVER = 1.3  # of those counted on a CPU: some operations start two
REPEATS = 5


class Rates(NamedTuple):
    """Of one accelerator, in powers of ten, named as in `HardwareConfig`."""

    tflops: float  # a square product in the dtype that the check decodes in
    memory_gb_per_second: float  # bytes read and written by a copy


def measure_rates(setup: Setup) -> Rates:
    """Time a large product and a large copy, of each the fastest of some repeats."""
    size, count = (1024, 2**26) if setup.is_cpu else (8192, 2**30)
    dtype = getattr(torch, setup.dtype)
    one = torch.randn(size, size, device=setup.device).to(dtype)
    bytes_N = torch.zeros(count, dtype=torch.uint8, device=setup.device)
    product = _fastest(setup, lambda: one @ one)
    copy = _fastest(setup, lambda: bytes_N.clone())
    return Rates(2 * size**3 / product / 1e12, 2 * count / copy / 1e9)


def _fastest(setup: Setup, work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 1):  # the first one warms up
        synchronize(setup.device)
        started = time.perf_counter()
        work()
        synchronize(setup.device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def count_kernels(setup: Setup) -> Iterator[Line]:
    """Compare the kernels and copies of a decode round, by the profiler, with those counted on a CPU."""
    what = "of a round of EAGLE-3, five drafts, a Llama of eight blocks"
    if not has_graphs(setup.device):
        yield absent("launches", f"kernels {what}", "torch's profiler sees kernels of CUDA devices alone")
        return
    with TemporaryDirectory(prefix="gpu-check-") as scratch:
        for temperature, kind in ((0.0, "greedy"), (1.0, "drawn")):
            run = run_under_way("eagle3", tiny_target(Path(scratch) / kind), temperature)
            launches = Launches()
            with torch.inference_mode(), launches.counting():
                run.round()
            run = run_under_way("eagle3", tiny_target(Path(scratch) / f"{kind} there", setup.device_name), temperature)
            with torch.inference_mode(), run.clock.phase("decode"):
                run.round()
                with profile(activities=supported_activities()) as seen:
                    run.round()
            names = [event.name for event in seen.events() if event.device_type != DeviceType.CPU]
            copies = {way: sum(f"Memcpy {way}" in name for name in names) for way in ("HtoD", "DtoH")}
            kernels = len(names) - sum(copies.values())
            most = round(KERNELS_OVER * launches.total)
            yield held("launches", f"kernels {what}, {kind}", str(kernels), f"at most {most}, counted", kernels <= most)
            told = f"{copies['HtoD']} to the device, {copies['DtoH']} from it"
            yield held("launches", f"copies {what}, {kind}", told, "one each way", max(copies.values()) <= 1)


def compare_processes(setup: Setup) -> Iterator[Line]:
    """Train a tiny target in two processes by DDP and FSDP2, beside one process."""
    if not has_graphs(setup.device) or torch.accelerator.device_count() < 2:
        yield absent("processes", "DDP and FSDP2 on two GPUs", "there are no two GPUs")
        return
    settings = EngineComparisonSettings(engines=["ddp_gpus", "fsdp2"], tasks=["heads"], on_gpus=True)
    for row in compare_engines(settings):
        told = f"losses differ by at most {row['loss_difference']:.2g} of theirs"
        expected = f"{row['tolerance']:g}, float32"
        yield held("processes", f"{row['recipe']}, {row['stage']}", told, expected, bool(row["within_tolerance"]))
