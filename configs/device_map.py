"""Where the blocks of a target that no single device holds lie, and which settings of that contradict each other.

A part of `configs.decoding.TargetConfig`; the map itself is made and held against the model in `distill.device_map`. Imports no
torch.
"""

from __future__ import annotations

import re
from typing import Literal, Protocol

DeviceMap = Literal["auto", "balanced", "sequential"] | dict[str, int | str] | None
MaxMemory = dict[int | str, int | str] | None

PLACE = re.compile(r"cpu|disk|[a-z]+:\d+")
BYTES = re.compile(r"\d+(\.\d+)?\s*[KMGT]i?B", re.IGNORECASE)


class Spreading(Protocol):
    """What is read of a `configs.decoding.TargetConfig`."""

    @property
    def name(self) -> str: ...
    @property
    def forward(self) -> str: ...
    @property
    def device_map(self) -> DeviceMap: ...
    @property
    def max_memory(self) -> MaxMemory: ...
    @property
    def offload_folder(self) -> str | None: ...


def check_device_map(config: Spreading) -> None:
    """Refuse settings that a spread target cannot follow.

    Raises:
        ValueError: saying which.
    """
    if config.device_map is None:
        for name, value in (("max_memory", config.max_memory), ("offload_folder", config.offload_folder)):
            if value is not None:
                raise ValueError(f"{name} says how a target is spread, and device_map is null: give auto there, or drop {name}")
        return
    if config.forward != "transformers":
        raise ValueError(
            f"device_map: forward {config.forward} packs all weights on one device; set forward to transformers, or "
            "device_map to null"
        )
    if config.name.endswith(".gguf"):
        raise ValueError(
            f"device_map: {config.name} is unpacked whole; give a folder of safetensors, or set device_map to null"
        )
    if isinstance(config.device_map, dict):
        if config.max_memory is not None:
            raise ValueError("max_memory: device_map says where each block lies, so there is nothing to choose; set it to null")
        _check_places(config.device_map)
    _check_memory(config.max_memory or {})


def _check_places(device_map: dict[str, int | str]) -> None:
    if not device_map:
        raise ValueError("device_map: the map is empty; name blocks (model.layers.0: 0), or give auto, or null")
    for module, place in device_map.items():
        if place < 0 if isinstance(place, int) else PLACE.fullmatch(place) is None:
            raise ValueError(
                f"device_map: {module!r} is to lie on {place!r}; a GPU's number, 'cpu', 'disk' or 'cuda:1' is accepted"
            )


def _check_memory(max_memory: dict[int | str, int | str]) -> None:
    for place, size in max_memory.items():
        if place != "cpu" and not str(place).isdigit():
            raise ValueError(f"max_memory: {place!r} is no GPU's number and not 'cpu'")
        if size < 0 if isinstance(size, int) else BYTES.fullmatch(size) is None:
            raise ValueError(f"max_memory: {place!r} has {size!r}; bytes, or a string as '70GiB', are accepted")
