"""Model FLOP utilisation (MFU): the floating-point operations that training needs over those that the device could do.

Counted as peers count (PaLM, 2204.02311, appendix B, without its term for attention): six for each trained parameter and token,
two for each parameter of the frozen target and token where it runs on the batches. Tokens are those of conversations, each
once: padding, recomputation, masked pairs, and the depths and blocks that a head adds to a position do not count.
"""

from __future__ import annotations

import torch

from configs.schema.training import ScheduleConfig
from heads.device import gpu_name

# Dense bfloat16, in 10^12 operations a second, of the makers' data sheets; by a part of the device's name, the first that fits.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "MI300X": 1307.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
}


def find_peak(device: torch.device, schedule: ScheduleConfig) -> float | None:
    """Return the operations a second of which a process's device is capable; None: not known, as for a CPU.

    The data sheets' figures are for 16 bits, so under float32 only `schedule.peak_tflops` says it.
    """
    if schedule.peak_tflops is not None:
        return schedule.peak_tflops * 1e12
    name = gpu_name(device)
    if name is None or schedule.mixed_precision == "no":
        return None
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part in name), None)


def flops_per_token(trained_parameters: int, frozen_parameters: int) -> float:
    """Return the operations of training for one token, the forward of the frozen target included."""
    return 6.0 * trained_parameters + 2.0 * frozen_parameters
