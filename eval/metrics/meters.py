"""Counters of energy that a machine keeps, which of them can be read here, and the joules of what is timed.

On an NVIDIA GPU the board's own counter (NVML; needs `nvidia-ml-py`), on a CPU the kernel's RAPL counters of all packages and
their memory; never an estimate from a power rating. A counter does not tell processes apart: it holds idle power and
whatever else runs on the machine, and on a GPU nothing of the host.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from configs.runtime.errors import first_line
from eval.decoder.clock import Clock
from heads.device import has_nvml, nvml_uuid

POWERCAP = Path("/sys/class/powercap")
MICRO, MILLI = 1e-6, 1e-3
MOST_WATTS = 1000.0  # of one package; a counter that could have gone round more than once at this power says nothing
SHARED = "several processes of this run share the machine's energy counters: measure with one"


@dataclass(frozen=True, kw_only=True)
class Metering:
    """A meter, or the reason why there is none."""

    meter: Meter | None = None
    reason: str | None = None


class MeteredClock(Clock):
    """A clock that reads a meter as well, at both ends of whole decodes and of the measuring within them.

    Other phases are too short for a counter.
    """

    METERED = ("decode", "measure")

    def __init__(self, device: torch.device, meter: Meter) -> None:
        super().__init__(device)
        self._meter, self.joules = meter, dict.fromkeys(self.METERED, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add time and energy spent inside the `with` block to a phase."""
        metered = name in self.METERED
        if metered:
            self._now()  # drains the queue of a GPU
            before = self._meter.read()
        with super().phase(name):
            yield
        if metered:
            self.joules[name] += self._meter.joules_between(before, self._meter.read())

    @property
    def decode_joules(self) -> float:
        """Joules of what is timed as decoding: without the prefill, and without measuring."""
        return self.joules["decode"] - self.joules["measure"]


# --- finding a counter --------------------------------------------------------------------------------------------


def find_meter(device: torch.device, num_processes: int = 1, powercap: Path = POWERCAP) -> Metering:
    """Return what can tell the energy of work on a device; processes that share a CPU cannot be told apart."""
    if has_nvml(device):
        return _nvml(device)
    if device.type != "cpu":
        return Metering(
            reason=f"no energy counter is known for device {device.type}; there is one for cpu and for NVIDIA's cuda"
        )
    return Metering(reason=SHARED) if num_processes > 1 else _rapl(powercap)


class RaplMeter:
    """The kernel's counters of some zones that hold no energy in common, given as (name, folder)."""

    def __init__(self, zones: Sequence[tuple[str, Path]]) -> None:
        self.source = f"RAPL, {', '.join(name for name, _ in zones)}"
        self._files = [folder / "energy_uj" for _, folder in zones]
        self._ranges = [_read_number(folder / "max_energy_range_uj") for _, folder in zones]  # start over there
        self.longest_seconds: float | None = min(self._ranges) * MICRO / MOST_WATTS

    def read(self) -> list[int]:
        """Return microjoules by zone."""
        return [_read_number(file) for file in self._files]

    def joules_between(self, before: Sequence[int], after: Sequence[int]) -> float:
        """Return joules over all zones; a counter that stands lower than before went round once."""
        spent = [(end - start) % range_ for range_, start, end in zip(self._ranges, before, after, strict=True)]
        return sum(spent) * MICRO


def _rapl(powercap: Path) -> Metering:
    try:
        zones = _zones(powercap)
        if not zones:
            return Metering(reason=f"the kernel keeps no energy counters of the processor (none under {powercap})")
        meter = RaplMeter(zones)
        meter.read()
    except (OSError, ValueError) as error:
        return Metering(reason=f"the energy counters cannot be read: {error}; as root: chmod a+r {powercap}/*/energy_uj")
    return Metering(meter=meter)


def _zones(powercap: Path) -> list[tuple[str, Path]]:
    """Return (name, folder) of every package, and of its memory where that is counted apart.

    A package's cores are in it; `psys` is the whole platform with the packages in it, and the intel-rapl-mmio zones are the
    same packages once more: none of these may be added.
    """
    named = [((path / "name").read_text().strip(), path) for path in sorted(powercap.glob("intel-rapl:*"))]
    packages = {path.name for name, path in named if name.startswith("package")}
    memory = [(name, path) for name, path in named if name == "dram" and path.name.rpartition(":")[0] in packages]
    return [(name, path) for name, path in named if path.name in packages] + [
        (f"{name} of {path.name}", path) for name, path in memory
    ]


def _read_number(file: Path) -> int:
    return int(file.read_text())


class NvmlMeter:
    """The energy counter of one GPU, which counts millijoules since the driver was loaded."""

    longest_seconds: float | None = None

    def __init__(self, nvml: Any, uuid: str) -> None:
        nvml.nvmlInit()
        self._nvml, self._handle = nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)
        name = nvml.nvmlDeviceGetName(self._handle)
        self.source = f"NVML, {name.decode() if isinstance(name, bytes) else name}"

    def read(self) -> list[int]:
        """Return the millijoules, as a list of one."""
        return [int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))]

    def joules_between(self, before: Sequence[int], after: Sequence[int]) -> float:
        """Return joules."""
        return (after[0] - before[0]) * MILLI


Meter = RaplMeter | NvmlMeter  # `joules_between` two reads, at most `longest_seconds` apart


def _nvml(device: torch.device) -> Metering:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return Metering(reason="reading a GPU's energy counter needs pynvml: pip install nvidia-ml-py")
    try:
        meter = NvmlMeter(nvml, nvml_uuid(device))
        meter.read()
    except nvml.NVMLError as error:
        return Metering(reason=f"the GPU's energy counter cannot be read: {first_line(error)}")
    return Metering(meter=meter)
