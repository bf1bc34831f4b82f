"""Joules per token, with the draft and without, by the machine's own counter where there is one.

On an NVIDIA GPU the board's counter (NVML, needs `nvidia-ml-py`), on a CPU the kernel's counters of all packages (RAPL); never
an estimate from a power rating. They hold idle power and whatever else runs on the machine. Counters are read where the
decode seconds begin and end. Without a counter the report's section holds the reason and no numbers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from configs.runtime.errors import first_line
from eval.decoder.records import AUTOREGRESSIVE, SPECULATIVE, Clock, Timing
from eval.metrics.speed import sums_by_batch
from eval.stats.bootstrap import paired_ratio_interval, ratio_interval
from heads.device import nvml_uuid

POWERCAP = Path("/sys/class/powercap")
MODES = (AUTOREGRESSIVE, SPECULATIVE)

Meter = Callable[[], float]  # joules since some time


class MeteredClock(Clock):
    """A clock that reads a meter as well, at both ends of whole decodes and of the measuring within them."""

    def __init__(self, device: torch.device, meter: Meter) -> None:
        super().__init__(device)
        self._meter, self.joules = meter, {"decode": 0.0, "measure": 0.0}  # other phases are too short for a counter

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add time and energy spent inside the `with` block to a phase."""
        if name not in self.joules:
            with super().phase(name):
                yield
            return
        self._now()  # drains the queue of a GPU
        before = self._meter()
        with super().phase(name):
            yield
        self.joules[name] += self._meter() - before

    @property
    def decode_joules(self) -> float:
        """Joules of what is timed as decoding: without the prefill, and without measuring."""
        return self.joules["decode"] - self.joules["measure"]


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


def summarise_energy(timings: Sequence[Timing], meter: Meter | str, *, samples: int, seed: int) -> dict[str, Any]:
    """Return the report's `energy` section (`meter` of `find_meter`); the bootstrap draws batches, as for the speed."""
    if isinstance(meter, str):
        return {"reason": meter, "joules_per_token": None}
    joules = [[timing.decode_joules for timing in timings if timing.mode == mode] for mode in MODES]
    if any(None in own or sum(filter(None, own)) <= 0 for own in joules):
        return {"reason": "the energy counters did not move", "joules_per_token": None}
    sums = [sums_by_batch(timings, mode, "decode_joules", "num_tokens") for mode in MODES]
    plain, speculative = (list(zip(*own.values(), strict=True)) for own in sums)  # joules, tokens
    found = {
        AUTOREGRESSIVE: ratio_interval(*plain, samples=samples, seed=seed),
        SPECULATIVE: ratio_interval(*speculative, samples=samples, seed=seed),
        "ratio": paired_ratio_interval(*speculative, *plain, samples=samples, seed=seed),
    }
    numbers = {name: each.point for name, each in found.items()} | {f"{name}_ci": each.bounds for name, each in found.items()}
    return {"reason": None, "joules_per_token": numbers}
