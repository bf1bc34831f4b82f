"""Copies of states in host memory, which are written while training goes on."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def host_copy(value: Any) -> Any:
    """Return a copy of a state dict in host memory; tensors that share their memory, as tied weights do, still share it."""
    return _copied(value, {})


def _copied(value: Any, known: dict[Any, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if key not in known:
            known[key] = value.detach().to("cpu", copy=True)
        return known[key] if value.numel() else value.detach().to("cpu", copy=True)  # one without elements has no place
    if isinstance(value, dict):
        return type(value)((name, _copied(each, known)) for name, each in value.items())
    return type(value)(_copied(each, known) for each in value) if isinstance(value, list | tuple) else value
