"""Counters of energy that a machine keeps, which of them can be read here, and the joules of what is timed.

On an NVIDIA GPU it is the board's own energy counter (NVML; needs `nvidia-ml-py`), on a CPU the kernel's RAPL counters of all
packages and their memory; never an estimate from a power rating. `eval.metrics.energy` makes joules per token of them. A
counter does not tell processes apart: it holds idle power and whatever else runs on the machine, and on a GPU nothing of the
host. Left out: wall plugs, whole clusters, and processors that several processes of one run share.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from configs.runtime.errors import first_line
from eval.decoder.clock import Clock

POWERCAP = Path("/sys/class/powercap")
MICRO, MILLI = 1e-6, 1e-3
MOST_WATTS = 1000.0  # of one package; a counter that could have gone round more than once at this power says nothing
SHARED = "several processes of this run share the machine's energy counters: measure with one"


class Meter(Protocol):
    """Some counters of a machine, read as whole numbers that only rise, but for starting over at the end of their range."""

    @property
    def source(self) -> str:
        """What is read, for the report."""

    @property
    def longest_seconds(self) -> float | None:
        """How far apart two reads may be; `None`: as far as you like."""

    def read(self) -> list[int]:
        """Return where the counters stand."""

    def joules_between(self, before: Sequence[int], after: Sequence[int]) -> float:
        """Return the energy spent between two reads, in joules."""


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
    """Return what can tell the energy of work on a device.

    Args:
        device: where the target runs.
        num_processes: of this run; those on one machine's CPU cannot be told apart.
        powercap: the kernel's folder of RAPL zones.
    """
    if device.type == "cuda":
        return _nvml(device)
    if device.type != "cpu":
        return Metering(reason=f"no energy counter is known for device {device.type}; there is one for cpu and cuda")
    return Metering(reason=SHARED) if num_processes > 1 else _rapl(powercap)


@dataclass(frozen=True)
class Zone:
    """One RAPL counter: its file, and the microjoules after which it starts over."""

    name: str
    file: Path
    range: int


class RaplMeter:
    """The kernel's counters of some zones that hold no energy in common."""

    def __init__(self, zones: Sequence[Zone]) -> None:
        self.source = f"RAPL, {', '.join(zone.name for zone in zones)}"
        self.longest_seconds: float | None = min(zone.range for zone in zones) * MICRO / MOST_WATTS
        self._zones = zones

    def read(self) -> list[int]:
        """Return microjoules by zone."""
        return [_read_number(zone.file) for zone in self._zones]

    def joules_between(self, before: Sequence[int], after: Sequence[int]) -> float:
        """Return joules over all zones; a counter that stands lower than before went round once."""
        spent = [(end - start) % zone.range for zone, start, end in zip(self._zones, before, after, strict=True)]
        return sum(spent) * MICRO


def _rapl(powercap: Path) -> Metering:
    try:
        zones = [Zone(name, path / "energy_uj", _read_number(path / "max_energy_range_uj")) for name, path in _zones(powercap)]
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
    memory = [(f"{name} of {path.name}", path) for name, path in named if _is_memory_of(name, path, packages)]
    return [(name, path) for name, path in named if path.name in packages] + memory


def _is_memory_of(name: str, path: Path, packages: set[str]) -> bool:
    return name == "dram" and path.name.rpartition(":")[0] in packages


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


def _nvml(device: torch.device) -> Metering:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return Metering(reason="reading a GPU's energy counter needs pynvml: pip install nvidia-ml-py")
    try:
        meter = NvmlMeter(nvml, f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        meter.read()
    except nvml.NVMLError as error:
        return Metering(reason=f"the GPU's energy counter cannot be read: {first_line(error)}")
    return Metering(meter=meter)
