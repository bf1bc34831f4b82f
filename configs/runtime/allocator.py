"""What the C library does with memory that is given back. Imports no torch."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # names of `mallopt` in glibc's malloc.h
KEPT = 2**30  # bytes at the end of the heap
MAPPED = 2**26  # bytes from which on a block is the kernel's own, and goes back to it


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, up to a gibibyte; other C libraries are left alone, and what the environment says stands.

    By its own thresholds a tensor of some mebibytes may be new memory each time, which the kernel maps and zeroes page by page:
    that was a quarter of the loss's time on two cores.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ:
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(M_MMAP_THRESHOLD, MAPPED)
    mallopt(M_TRIM_THRESHOLD, KEPT)
