"""Every benchmark and check by one command: `python scripts/lab/benchmark.py NAME [--config FILE] [--set KEY=VALUE]`.

`--help` lists the names; docs/results/ holds what they wrote. Most need the draft of `make demo` or the heads that
`benchmark.py heads` trains, and two cores that nothing else uses; what is compared is run in turns. Ends with 1 where a check
that belongs to the measurement fails, e.g. where answers differ by more than a tie.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from configs.startup import guard_imports

    guard_imports()

from configs.runtime.command import run_command
from configs.schema.base import Settings
from scripts.lab import head_settings, settings
from scripts.lab.bench.provenance import check_place


class Benchmark(NamedTuple):
    config: type[Settings]
    function: str  # that runs it, by its place in scripts.lab
    help: str


BENCHMARKS = {
    "demo": Benchmark(
        settings.BenchDemoConfig, "bench.demo.record_demo", "what make demo measured, as a results file (after make demo)"
    ),
    "decode": Benchmark(
        settings.BenchDecodeConfig,
        "bench.decode.benchmark.compare_decoding",
        "the decoder beside transformers' generation (after make demo; ten minutes)",
    ),
    "distill": Benchmark(
        settings.BenchDistillConfig,
        "bench.distill.benchmark.compare_distillation",
        "the distillation loss and training beside plain ways and TRL's, tau before and after (after make demo)",
    ),
    "heads": Benchmark(
        head_settings.BenchHeadsConfig, "bench.heads.compare_heads", "head families on one target (two hours, the first time)"
    ),
    "curve": Benchmark(
        head_settings.BenchCurveConfig,
        "bench.curve.measure_curve",
        "tokens per target step by the answer tokens trained on, nothing timed (a night, the first time)",
    ),
    "scale": Benchmark(
        settings.BenchScaleConfig,
        "bench.scale.compare_scale",
        "two processes beside one, padding, checkpoints, waiting for data (after heads)",
    ),
    "engines": Benchmark(
        settings.EngineComparisonSettings,
        "bench.engines.check_engines",
        "the loss under DDP, FSDP2 and ZeRO beside one process's",
    ),
    "models": Benchmark(
        settings.ModelsCheckConfig,
        "models_check.runner.check_models",
        "tiny models of every family of transformers through every stage, against transformers (12 minutes)",
    ),
    "launches": Benchmark(
        settings.LaunchesConfig,
        "counts.record.record_launches",
        "what a GPU would start, move and wait for in decoding and training, counted on the CPU (a minute)",
    ),
    "gpu": Benchmark(
        settings.GpuCheckConfig,
        "gpu_check.check.check_gpu",
        "this machine's accelerator: its results beside the CPU's, its speed, on one page (ten minutes)",
    ),
    "serve": Benchmark(
        settings.ServeCheckConfig,
        "engine_check.cases.run_checks",
        "exported drafts in vLLM, transformers, llama.cpp and OpenVINO beside our decoder (needs a --config)",
    ),
    "soak": Benchmark(
        settings.SoakConfig,
        "fault_injection.rounds.soak",
        "tiny runs killed, stopped and damaged at random, to end with an undisturbed run's weights (15 minutes)",
    ),
    "tables": Benchmark(
        settings.ResultsTableConfig, "bench.tables.update_tables", "fill the tables of a document from docs/results/"
    ),
}


def main(config: Settings, arguments: argparse.Namespace) -> int | None:
    benchmark = BENCHMARKS[arguments.name]
    if output := getattr(config, "output", None):
        check_place(output)  # before the hours that it takes
    module, function = f"scripts.lab.{benchmark.function}".rsplit(".", 1)
    code: int | None = getattr(import_module(module), function)(config)
    return code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("name", metavar="NAME", choices=BENCHMARKS, help=f"one of {', '.join(BENCHMARKS)}")


def run(argv: Sequence[str]) -> int:
    names = "\n".join(f"  {name:10} {benchmark.help}" for name, benchmark in BENCHMARKS.items())
    description = f"Run a benchmark or check:\n\n{names}"
    config_class = next((BENCHMARKS[word].config for word in argv if word in BENCHMARKS), Settings)
    return run_command(config_class, main, description=description, argv=argv, add_arguments=add_arguments)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
