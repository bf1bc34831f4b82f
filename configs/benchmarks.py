"""The configs of the benchmarks under `scripts/`: what is measured beside what, how often, and where the figures go.

The defaults are the runs whose figures stand in `docs/results/`. Commands that train, evaluate or ship have theirs in
`configs.schema`. Imports no torch.
"""

from __future__ import annotations

from typing import Literal

from configs.costs import CostConfig
from configs.decoding import TargetConfig
from configs.evaluating import LosslessConfig, SuiteConfig
from configs.settings import NonNegativeInt, PositiveFloat, PositiveInt, Settings


class BenchLossConfig(Settings):
    """The loss part of `scripts/bench_distill.py`: forward and backward over random hidden states and frozen heads."""

    vocab_size: PositiveInt = 151_936  # rows of both heads
    width: PositiveInt = 576  # of both sides' hidden states
    chunk_size: PositiveInt = 128  # positions whose logits live at one time in our loss
    positions: PositiveInt = 4096  # halved until the unchunked loss fits into max_gibibytes and the free memory
    repeats: PositiveInt = 3  # processes by side, each for one pass
    max_gibibytes: PositiveFloat = 24.0  # most memory that the unchunked loss may take; 4096 positions take 21


class BenchDistillConfig(Settings):
    """`scripts/bench_distill.py`: the loss's memory and time, training from a cache, a draft before and after training."""

    draft: str = "runs/demo/distill/artifact"  # a distilled draft LM; its target, data and recipe are what is measured
    loss: BenchLossConfig = BenchLossConfig()
    num_batches: PositiveInt = 12  # timed optimiser steps by side
    trl_batch_size: PositiveInt = 4  # conversations a batch beside TRL's trainer, where that is installed
    num_prompts: PositiveInt = 24  # held-out conversations decoded for tau, the last of the file: the first chose the draft
    max_new_tokens: PositiveInt = 48
    sweep: str | None = "runs/sweep/sweep.json"  # of `scripts/sweep.py`: where the file exists, its rows join ours
    bootstrap_samples: PositiveInt = 2000
    output: str = "docs/results/distill.json"


class BenchHeadsConfig(Settings):
    """`scripts/bench_heads.py`: every head family trained and measured on one target and one set of data."""

    data: str | None = "configs/data/heads.yaml"  # of `scripts/make_data.py`, run where its output is not there; None: never
    # of `scripts/make_cache.py`, made once of that data and read by every head's training; None: the target runs on every batch
    cache: str | None = "configs/cache/heads.yaml"
    recipes: list[str] = [  # of `train/heads.py`, a row of the table each; all on the same target and data
        "configs/heads/medusa.yaml",
        "configs/heads/hydra.yaml",
        "configs/heads/eagle3.yaml",
        "configs/heads/mtp.yaml",
        "configs/heads/peagle.yaml",
        "configs/heads/dflash.yaml",
    ]
    draft_models: list[str] = []  # of `train/distill.py`, measured beside the heads
    runs: str = "runs/heads/bench"  # folder: what was trained, kept for the next time
    num_prompts: PositiveInt = 32  # held-out prompts decoded, the last of the file: the first chose the checkpoints
    max_new_tokens: PositiveInt = 64
    repeats: PositiveInt = 1  # timed runs of every prompt
    lossless: LosslessConfig = LosslessConfig()
    eagle3: str | None = "configs/heads/eagle3.yaml"  # trained beside speculators' module, if that is installed; None: not
    num_batches: PositiveInt = 8  # timed optimiser steps by side of that
    bootstrap_samples: PositiveInt = 2000
    output: str = "docs/results/heads.json"


class BenchDecodeConfig(Settings):
    """`scripts/bench_decode.py`: the decoder beside transformers' own generation, and every way of decoding beside the others.

    All on the same prompts and in turns.
    """

    target: TargetConfig = TargetConfig()
    draft: str = "runs/demo/distill/artifact"  # the artifact of a draft LM
    heads: BenchHeadsConfig | None = BenchHeadsConfig()  # whose heads join the table, trained where they are not; None: none
    held_out: str = "runs/heads/data/held_out.jsonl"  # conversations on which nothing was trained
    num_choosing: PositiveInt = 16  # at the file's beginning, which chose checkpoints and choose trees and lengths here
    num_prompts: PositiveInt = 24  # measured, the last of the file
    past_answers: str | None = "runs/heads/data/train.jsonl"  # conversations whose answers suffix lookup has seen; None: none
    num_speculative_tokens: PositiveInt = 3
    max_new_tokens: PositiveInt = 48
    repeats: PositiveInt = 2  # timed runs of every side on every prompt; sampled runs take another seed each time
    bootstrap_samples: PositiveInt = 2000
    output: str = "docs/results/decode.json"


class BenchEvalConfig(Settings):
    """`scripts/bench_eval.py`: predicted speedups against measured ones, and what evaluating costs beyond decoding."""

    target: TargetConfig = TargetConfig()
    draft: str = "runs/demo/distill/artifact"  # the artifact of a draft
    suite: SuiteConfig = SuiteConfig(num_prompts=24)
    max_new_tokens: PositiveInt = 32
    repeats: PositiveInt = 1  # timed runs of every prompt by every number of drafts
    # The sweep that predictions are made of; its num_speculative_tokens is the largest that is predicted and measured
    cost: CostConfig = CostConfig(batch_sizes=[1], context_tokens=[96, 192], repeats=5)
    aggregated_prompts: PositiveInt = 10_000  # whose records, of made-up rounds, are counted and summarised
    simulations: PositiveInt = 1000  # of a suite of prompts with a known truth, for the coverage of intervals
    bootstrap_samples: PositiveInt = 2000
    output: str = "docs/results/eval.json"
    runs: str = "runs/bench_eval"  # folder: the evaluation that predictions are made of


class SoakConfig(Settings):
    """`scripts/soak.py`: tiny runs that are killed, stopped and damaged at random, and must end as if nothing had happened."""

    rounds: PositiveInt = 210  # shared evenly by the faults
    most_kills: PositiveInt = 3  # of one run, before it is left to end
    seed: NonNegativeInt = 0
    folder: str | None = None  # where the runs lie; None: a temporary folder. Those that ended otherwise than they should stay
    output: str = "docs/results/soak.json"


class EngineComparisonSettings(Settings):
    """`scripts/engine_comparison.py`: two processes under each engine beside one process, on a tiny target."""

    # Files of configs/accelerate, started as they are but for the number of processes
    engines: list[Literal["ddp_cpu", "fsdp2", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]] = [
        "ddp_cpu",
        "fsdp2",
        "zero1",
        "zero2",
        "zero2_offload",
        "zero3",
        "zero3_offload",
    ]
    tasks: list[Literal["distill", "heads"]] = ["distill", "heads"]
    steps: PositiveInt = 20
    tolerance: PositiveFloat = 1e-4  # largest difference of a step's loss, as a share of it
    python: str | None = None  # interpreter for DeepSpeed's engines, where it is installed elsewhere; None: this one
    seconds: PositiveInt = 600  # that one run may take


class ResultsTableConfig(Settings):
    """`scripts/results_table.py`: the tables of a document, made from the files of the benchmarks."""

    document: str = "README.md"
    results: str = "docs/results"  # folder with NAME.json for each `<!-- table: NAME -->`
