"""How fast one way of decoding is against another, and on what energy, in the same run and on the same batches.

The cluster is the batch of prompts decoded together; its repeats and turns are summed first, because they share the prompts'
difficulty and are no independent evidence. Both sides count the same kind of token ids, and the prefill's token belongs to
neither decode time nor decode tokens.

Joules per token are those of the machine's own counter where there is one, never an estimate from a power rating: on an NVIDIA
GPU the board's (NVML, needs `nvidia-ml-py`), on a CPU the kernel's of all packages (RAPL). They hold idle power and whatever
else runs on the machine. Counters are read before and after a whole decode, prefill included.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from configs.runtime.errors import first_line
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, Timing
from eval.stats import Interval, fields_of, paired_ratio_interval, ratio_interval
from heads.device import nvml_uuid

PHASES = ("draft_seconds", "verify_seconds", "sample_seconds", "overhead_seconds")
POWERCAP = Path("/sys/class/powercap")
MODES = (AUTOREGRESSIVE, SPECULATIVE)

Sums = Mapping[Any, Sequence[float]]  # two sums by cluster
Meter = Callable[[], float]  # joules since some time


def summarise_speed(timings: Sequence[Timing]) -> dict[str, Any] | None:
    """Return speculative decoding's speed against plain decoding, or `None` where one of the two was not timed.

    By `per_batch`, [decode seconds, decode tokens] of both modes, another report is compared batch by batch
    (`eval.report.comparison`).
    """
    by_mode = {mode: [timing for timing in timings if timing.mode == mode] for mode in MODES}
    if not all(by_mode.values()):
        return None
    result = compare_speed(timings, SPECULATIVE)
    for mode, own in by_mode.items():
        seconds, num_tokens = (sum(getattr(timing, field) for timing in own) for field in ("decode_seconds", "num_tokens"))
        result[f"decode_seconds_{mode}"] = seconds
        result[f"decode_tokens_{mode}"] = num_tokens
        result[f"milliseconds_per_token_{mode}"] = 1000 * seconds / num_tokens if num_tokens else None
    phases = {phase: sum(getattr(timing, phase) for timing in by_mode[SPECULATIVE]) for phase in PHASES}
    plain, speculative = (sums_by_batch(timings, mode, "decode_seconds", "num_tokens") for mode in by_mode)
    whole = sum(phases.values()) or 1.0
    result |= {"phases": phases, "phase_shares": {phase: seconds / whole for phase, seconds in phases.items()}}
    result["per_batch"] = [
        {"prompt_ids": list(batch), AUTOREGRESSIVE: own, SPECULATIVE: speculative[batch]}
        for batch, own in plain.items()
        if batch in speculative
    ]
    return result | {"repeats": len({timing.repeat for timing in by_mode[SPECULATIVE]})}


def compare_speed(timings: Sequence[Timing], mode: str) -> dict[str, Any]:
    """Return how much faster `mode` was than plain decoding: totals with prefill and without."""
    modes = (AUTOREGRESSIVE, mode)
    runs = [sorted((each.prompt_ids, each.repeat) for each in timings if each.mode == name) for name in modes]
    if runs[0] != runs[1]:
        raise ValueError(
            f"{AUTOREGRESSIVE} and {mode} were timed on different batches or repeats; a speedup needs the same for both"
        )
    decode, whole = (
        sums_ratio(*(sums_by_batch(timings, name, *fields) for name in modes))
        for fields in (("decode_seconds", "num_tokens"), ("whole_seconds", "whole_tokens"))
    )
    return fields_of({"decode_speedup": decode, "end_to_end_speedup": whole})


def summarise_advantage(
    timings: Sequence[Timing], counts: Mapping[str, Sums], mode: str, over: str
) -> dict[str, float | list[float] | None]:
    """Return the tokens per target step of `mode`, and its decode speed, divided by those of the mode `over`, with intervals.

    `counts` are `{prompt id: [committed tokens, rounds]}` of both. Prompts that only one of them has are left out, as are
    batches on which only one was timed.
    """
    own, other = (sums_by_batch(timings, each, "num_tokens", "decode_seconds") for each in (mode, over))
    tau, speed = sums_ratio(counts[mode], counts[over]), sums_ratio(own, other)
    return fields_of({"tokens_per_target_step_ratio": tau, "decode_speed_ratio": speed})


def sums_ratio(ours: Sums, theirs: Sums) -> Interval:
    """Return (sum a / sum b) / (sum c / sum d) over the clusters that both have."""
    common = [cluster for cluster in ours if cluster in theirs]
    a, b, c, d = ([sums[cluster][column] for cluster in common] for sums in (ours, theirs) for column in (0, 1))
    return paired_ratio_interval(a, b, c, d)


def timings_within(timings: Iterable[Timing], prompt_ids: set[str]) -> list[Timing]:
    """Return the timings of batches of only these prompts, or none where a batch, which has one time, holds others as well."""
    touching = [timing for timing in timings if prompt_ids.intersection(timing.prompt_ids)]
    return touching if all(prompt_ids.issuperset(timing.prompt_ids) for timing in touching) else []


def sums_by_batch(timings: Sequence[Timing], mode: str, *fields: str) -> dict[tuple[str, ...], list[float]]:
    """Return sums of some fields of one mode's timings by batch; repeats and turns are no evidence of their own.

    A later turn goes on with those prompts of a batch that have one, and counts with the batch that they were first decoded in.
    """
    home: dict[tuple[str, ...], tuple[str, ...]] = {}
    first_with: dict[str, tuple[str, ...]] = {}
    for timing in timings:
        home[timing.prompt_ids] = first = first_with.get(timing.prompt_ids[0], timing.prompt_ids)
        first_with |= {prompt_id: first for prompt_id in timing.prompt_ids if prompt_id not in first_with}
    sums: dict[tuple[str, ...], list[float]] = {}
    for timing in timings:
        if timing.mode == mode:
            batch = sums.setdefault(home[timing.prompt_ids], [0.0] * len(fields))
            for place, field in enumerate(fields):
                batch[place] += getattr(timing, field)
    return sums


# --- energy ---------------------------------------------------------------------------------------------------------


def find_meter(device: torch.device, num_processes: int = 1, powercap: Path = POWERCAP) -> Meter | str:
    """Return what reads the energy of work on a device, or why nothing can; processes on one CPU cannot be told apart."""
    if (uuid := nvml_uuid(device)) is not None:
        return _nvml(uuid)
    if device.type != "cpu" or num_processes > 1:
        return f"there is no counter for one process of {num_processes} on {device.type}: use one on cpu, or NVIDIA's cuda"
    try:
        zones = [path for path in powercap.glob("intel-rapl:*") if (path / "name").read_text().startswith("package")]
        ranges = [int((zone / "max_energy_range_uj").read_text()) for zone in zones]
        meter = _rapl(zones, ranges)
        meter()
    except (OSError, ValueError) as error:
        return f"the energy counters cannot be read: {error}; as root: chmod a+r {powercap}/*/energy_uj"
    return meter if zones else f"the kernel keeps no energy counters of the processor (none under {powercap})"


def _rapl(zones: Sequence[Path], ranges: Sequence[int]) -> Meter:
    """Return a meter of the packages' counters, in microjoules; one that stands lower than before has gone round once."""
    total, last = 0, [0] * len(zones)

    def read() -> float:
        nonlocal total, last
        now = [int((zone / "energy_uj").read_text()) for zone in zones]
        total += sum((end - start) % size for start, end, size in zip(last, now, ranges, strict=True))
        last = now
        return total * 1e-6

    return read


def _nvml(uuid: str) -> Meter | str:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return "reading a GPU's energy counter needs pynvml: pip install nvidia-ml-py"
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError as error:
        return f"the GPU's energy counter cannot be read: {first_line(error)}"
    return lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) * 1e-3  # it counts millijoules


def summarise_energy(timings: Sequence[Timing], meter: Meter | str) -> dict[str, Any]:
    """Return the report's `energy` section (`meter` of `find_meter`); intervals are over batches, as for the speed."""
    if isinstance(meter, str):
        return {"reason": meter, "joules_per_token": None}
    joules = [[timing.joules for timing in timings if timing.mode == mode] for mode in MODES]
    if any(None in own or sum(filter(None, own)) <= 0 for own in joules):
        return {"reason": "the energy counters did not move", "joules_per_token": None}
    sums = {mode: sums_by_batch(timings, mode, "joules", "whole_tokens") for mode in MODES}
    found = {mode: ratio_interval(*zip(*own.values(), strict=True)) for mode, own in sums.items()}
    ratio = sums_ratio(sums[SPECULATIVE], sums[AUTOREGRESSIVE])
    return {"reason": None, "joules_per_token": fields_of(found | {"ratio": ratio})}
