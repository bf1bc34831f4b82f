"""`make gpu-check`: its parts in order, each by itself, so that one that breaks leaves the others their lines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from configs.runtime.command import DONE, GATE_FAILED
from configs.runtime.files import write_text
from scripts.lab.bench.harness import write_results
from scripts.lab.bench.provenance import describe_origin
from scripts.lab.gpu_check.machine import compare_processes, count_kernels, measure_rates
from scripts.lab.gpu_check.page import Line, page_of, tried
from scripts.lab.gpu_check.results import compare_artifact, compare_losses, compare_tokens
from scripts.lab.gpu_check.setup import Setup
from scripts.lab.gpu_check.speed import time_decoding, time_training, train_head
from scripts.lab.settings import GpuCheckConfig

log = logging.getLogger("draftsmith")

END = Line(part="", what="", found="")


def check_gpu(config: GpuCheckConfig) -> int:
    """Check this machine's accelerator; write `gpu-check.json` and `gpu-check.md`. The exit code says whether a line fails."""
    setup, measured = Setup(config), {}

    def machine(setup: Setup) -> Iterator[Line]:
        rates = measure_rates(setup)
        measured.update(rates._asdict())
        yield Line(part="machine", what=f"a product in {setup.dtype}", found=f"{rates.tflops:.3g} TFLOP/s")
        yield Line(part="machine", what="a copy in its memory", found=f"{rates.memory_gb_per_second:.3g} GB/s")

    def training(setup: Setup) -> Iterator[Line]:
        for each in time_training(setup, measured["tflops"]):
            if isinstance(each, Line):
                yield each
            else:
                measured["utilisation"] = each

    lines: list[Line] = []
    parts = [machine, compare_losses, compare_tokens, count_kernels, train_head, compare_artifact, training, time_decoding]
    for part in (*parts, compare_processes):
        for line in _lines_of(part, setup):
            log.info("%s: %s: %s (%s)", line.part, line.what, line.found, line.verdict)
            lines.append(line)
        setup.free()
    folder = Path(config.output)
    rows = [asdict(line) for line in lines]
    write_results(
        folder / "gpu-check.json", "gpu_check", config, rows=rows, ratios={}, measured=measured, device=setup.device_name
    )
    page = folder / "gpu-check.md"
    write_text(page, page_of(lines, describe_origin(), setup.device_name) + "\n")
    log.info("page in %s", page)
    return GATE_FAILED if any(line.verdict == "fails" for line in lines) else DONE


def _lines_of(part: Callable[[Setup], Iterable[Line]], setup: Setup) -> Iterator[Line]:
    """Yield a part's lines; where it breaks off the last one says so."""
    lines = iter(part(setup))
    while (line := tried(part.__name__.replace("_", " "), "to the end", lambda: next(lines, END))) is not END:
        yield line
