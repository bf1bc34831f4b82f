"""A device `mock` that is not the CPU and runs on it, for tests; see `mock_device.cpp`. It is the process's accelerator.

What it shows: tensors on the wrong device, hidden transfers and waits by line, autocast, generators and events by device type.
What it cannot show: kernels, the order of streams, memory, speed, CUDA graphs, several devices.
"""

import sys
import types
from collections import Counter
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock
from torch.utils.cpp_extension import load

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / ".cache" / "mock_device"
NAME = "mock"
# They copy or count for others: the line that wanted it is further out.
COPYING = ("heads/device.py",)


@cache
def register_mock_device():
    """Build the extension where that was not done (some seconds), and make `mock` the accelerator of this process."""
    BUILD.mkdir(parents=True, exist_ok=True)
    torch.utils.rename_privateuse1_backend(NAME)
    with FileLock(BUILD.with_suffix(".lock")):
        (BUILD / "lock").unlink(missing_ok=True)  # torch's own, which a build that was killed leaves and the next waits for
        extension = load(
            "draftsmith_mock_device",
            [str(Path(__file__).with_name("mock_device.cpp"))],
            build_directory=str(BUILD),
            extra_cflags=["-O0", "-DAT_PER_OPERATOR_HEADERS"],
        )
    module = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.synchronize = lambda device=None: torch.accelerator.synchronize(device)
    module.manual_seed_all = module.manual_seed = lambda seed: None  # it draws from the CPU's generator
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    return extension


@contextmanager
def counted():
    """Count what passes between host and device, and waits, inside the `with` block: `{(kind, file:line): times}`.

    The line is the innermost one of the project that wants something copied, not the one that copies for all.
    """
    counts = Counter()

    def see(kind):
        frame = sys._getframe().f_back  # None in autograd's own thread
        while frame is not None:
            path = frame.f_code.co_filename
            if path.startswith(f"{ROOT}/") and "/.venv/" not in path and not path.endswith(COPYING):
                counts[kind, f"{path.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"] += 1
                return
            frame = frame.f_back
        counts[kind, "outside"] += 1

    extension = register_mock_device()
    extension.observe(see)
    try:
        yield counts
    finally:
        extension.observe(None)
