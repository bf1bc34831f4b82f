"""The configs of `scripts/lab/benchmark.py`: what is measured, how often, and where the results go.

The defaults are the runs whose results are in `docs/results/`. Imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from configs.schema.base import (
    Dtype,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
    Share,
)
from configs.schema.evaluation import LosslessConfig
from configs.schema.target import TargetConfig
from scripts.lab.head_settings import OWN_HEADS, BenchHeadsConfig


class BenchLossConfig(Settings):
    """The loss part of `scripts/lab/benchmark.py distill`: forward and backward over random hidden states and frozen heads."""

    vocab_size: PositiveInt = 151_936  # rows of both heads
    width: PositiveInt = 576  # of both sides' hidden states
    chunk_size: PositiveInt = 128  # positions whose logits live at one time in our loss
    positions: PositiveInt = 4096  # halved until the unchunked loss fits into 24 GiB and the free memory
    repeats: PositiveInt = 3  # processes by side, each for one pass


class BenchDistillConfig(Settings):
    """`make bench-distill`: the loss's memory and time, training from a cache, a draft before and after training."""

    draft: str = "runs/heads/draft_lm/artifact"  # a distilled draft LM; its target, data and recipe are what is measured
    loss: BenchLossConfig = BenchLossConfig()
    num_batches: PositiveInt = 12  # timed optimiser steps by side
    trl_batch_size: PositiveInt = 4  # conversations a batch beside TRL's trainer, where that is installed
    num_prompts: PositiveInt = 24  # held-out conversations decoded for tau, the last of the file: the first chose the draft
    max_new_tokens: PositiveInt = 48
    # Recipes trained beside each other, by what the table calls them: sections in place of the draft's own
    variants: dict[str, dict[str, Any]] = {
        "forward_kl": {"loss": {"divergence": "forward_kl"}},
        "reverse_kl": {"loss": {"divergence": "reverse_kl"}},
        "jsd": {"loss": {"divergence": "jsd", "settings": {"jsd": {"beta": 0.5}}}},
        "total_variation": {"loss": {"divergence": "total_variation"}},
        "negative_log_acceptance": {"loss": {"divergence": "negative_log_acceptance"}},
        "kl_tv_blend": {"loss": {"divergence": "kl_tv_blend"}},
        "forward_kl_and_tv": {"loss": {"mix": {"forward_kl": 1.0, "total_variation": 1.0}}},
    }
    variant_steps: PositiveInt = 60
    runs: str = "runs/distill/bench"  # folder: the recipes' trainings, kept for the next time
    bootstrap_samples: PositiveInt = 2000
    output: str = "docs/results/distill.json"


class BenchDemoConfig(Settings):
    """`scripts/lab/benchmark.py demo`: the figures of the demo's reports."""

    reports: list[str] = ["runs/demo/eval/report.json"]
    output: str = "docs/results/demo.json"


class BenchDecodeConfig(Settings):
    """`scripts/lab/benchmark.py decode`: the decoder beside transformers' generation, and all ways of decoding in turns."""

    target: TargetConfig = TargetConfig()
    draft: str = "runs/heads/draft_lm/artifact"  # the artifact of a draft LM
    heads: BenchHeadsConfig | None = OWN_HEADS  # whose heads join the table, trained where they are not; None: none
    held_out: str = "runs/heads/data/held_out.jsonl"  # conversations on which nothing was trained
    num_choosing: PositiveInt = 16  # at the file's beginning, which chose checkpoints and choose trees and lengths here
    num_prompts: PositiveInt = 24  # measured, the last of the file
    past_answers: str | None = "runs/heads/data/train.jsonl"  # conversations whose answers suffix lookup has seen; None: none
    num_speculative_tokens: PositiveInt = 3
    max_new_tokens: PositiveInt = 48
    repeats: PositiveInt = 2  # timed runs of every side on every prompt; sampled runs take another seed each time
    bootstrap_samples: PositiveInt = 2000
    output: str = "docs/results/decode.json"


class SoakConfig(Settings):
    """`scripts/lab/benchmark.py soak`: tiny runs killed, stopped and damaged at random."""

    rounds: PositiveInt = 210  # shared evenly by the faults
    max_kills: PositiveInt = 3  # of one run, before it is left to end
    seed: NonNegativeInt = 0
    folder: str | None = None  # where the runs lie; None: a temporary folder. Those that ended otherwise than they should stay
    output: str = "docs/results/soak.json"


class ModelsCheckConfig(Settings):
    """`scripts/lab/benchmark.py models`: a tiny model of every family of transformers through every stage."""

    names: list[
        str
    ] = []  # of transformers' causal-LM mapping, or variants (scripts/lab/models_check/architectures.py); empty: all
    stages: list[str] = []  # only these, and "load" before them (scripts/lab/models_check/stages.py); empty: all
    workers: PositiveInt = 2  # processes, each with one family at a time
    seconds: PositiveInt = 120  # that one family may take
    output: str = "docs/results/models.json"
    document: str | None = "docs/models.md"  # whose table is filled from the results; None: none


class LaunchesConfig(Settings):
    """`scripts/lab/benchmark.py launches`: kernels that a decode round and a training step would start, counted on the CPU."""

    output: str = "docs/results/launches.json"


class GpuCheckConfig(Settings):
    """`make gpu-check`: results and speed of this machine's accelerator, on one page. Its defaults take ten minutes."""

    target: str = "embedded:smollm2-135m-instruct"
    dtype: Dtype = "bfloat16"  # of decoding and training where nothing is compared with the CPU's float32
    suite: str = "eval/suites/house64.jsonl"
    num_prompts: PositiveInt = 32
    max_new_tokens: PositiveInt = 64
    training_steps: PositiveInt = 100  # of the head that is decoded with
    timed_steps: PositiveInt = 10
    batch_size: PositiveInt = 8
    row_tokens: PositiveInt = 1024  # of the rows of timed steps
    output: str = "runs/gpu_check"


class EngineComparisonSettings(Settings):
    """`scripts/lab/benchmark.py engines`: two processes under each engine beside one process, on a tiny target."""

    # Files of configs/accelerate, started as they are but for the number of processes
    engines: list[Literal["ddp_cpu", "ddp_gpus", "fsdp2", "zero2", "zero3", "zero3_offload"]] = [
        "ddp_cpu",
        "fsdp2",
        "zero2",
        "zero3",
        "zero3_offload",
    ]
    tasks: list[Literal["distill", "heads"]] = ["distill", "heads"]
    steps: PositiveInt = 20
    tolerance: PositiveFloat = 1e-4  # largest difference of a step's loss, as a share of it
    on_gpus: bool = False  # a GPU a process, else the CPU for all
    seconds: PositiveInt = 600  # that one run may take
    target: str = (
        "embedded:smollm2-135m-instruct"  # whose memory `scripts/lab/benchmark.py scale` measures where processes share it
    )


class ResultsPart(Settings):
    """What of a results file a document's table shows (`bench.tables`)."""

    ratios: list[str] = []
    rows: dict[str, list[Any]] = {}  # by the values that they may have in some columns
    columns: list[str] | None = None  # of these rows; None: all


class ResultsTableConfig(Settings):
    """`scripts/lab/benchmark.py tables`: the tables of the documents, made from the files of the benchmarks."""

    document: str | None = None  # None: README.md and the pages of docs/
    results: str = "docs/results"  # folder with NAME.json for each `<!-- table: NAME -->`


class BenchScaleConfig(Settings):
    """`scripts/lab/benchmark.py scale`: several processes beside one, padding, time of checkpoints and waiting for data."""

    recipe: str = "configs/heads/eagle3.yaml"  # of `train/heads.py`
    cache: str | None = "runs/heads/cache"  # of its data; None: the target runs on every batch
    num_processes: PositiveInt = 2  # beside one; with batches of the recipe's size each, and sharing one
    steps: PositiveInt = 24  # timed optimiser steps a run, after as many to warm up
    repeats: PositiveInt = 5  # runs of each side, in turns
    # Steps between two checkpoints that docs/scaling.md advises, and that checkpoint_share is reckoned for: at 0.6 s a step the
    # work of two minutes
    checkpoint_every_steps: PositiveInt = 200
    engines: bool = (
        True  # add the rows of `scripts/lab/benchmark.py engines`, and what a process holds of a target that several share
    )
    bootstrap_samples: PositiveInt = 2000
    output: str = "docs/results/scale.json"


# Engines that are run here, and those whose folders are only written and checked.
RunEngine = Literal["vllm", "transformers", "llama_cpp", "openvino"]
CheckedEngine = Literal["sglang"]


class ServeCase(Settings):
    """A draft in an engine."""

    artifact: str | None = None  # a folder written by train/distill.py or train/heads.py
    recipe: str | None = None  # of `train/heads.py`, in its place: a head among the check's `heads`, trained where it is not
    engine: RunEngine | CheckedEngine | None  # None: no engine takes a draft of this kind, and the table says so
    num_speculative_tokens: PositiveInt | None = None  # None: what the artifact says, of DFlash a whole block
    # How many of the prompts that got the same tokens must have taken the same rounds and accepted drafts too. Below 1 because
    # drafts that are nearly tied fall either way, and because an engine may depart from ours in a known detail. A draft that is
    # exported wrong changes the counts of almost every prompt. Ask for 1.0 where they have been seen to be equal.
    same_counts_share: Share = 0.6

    @model_validator(mode="after")
    def _names_one_draft(self) -> Self:
        if (self.artifact is None) == (self.recipe is None):
            raise ValueError("give either `artifact`, a trained draft, or `recipe`, of the head to try")
        return self


class ServeCheckConfig(Settings):
    """`scripts/lab/benchmark.py serve`: drafts in real engines, beside our decoder on the same prompts."""

    cases: list[ServeCase] = []  # scripts/lab/configs/serve/ has some
    # Data, cache and folder of the heads that cases name by recipe; its own recipes and measurements are not read
    heads: BenchHeadsConfig = OWN_HEADS
    # Greedy answers are compared in float32, where near ties are rare; in bfloat16 more of them may differ.
    target: TargetConfig = TargetConfig(dtype="float32", device="cpu")
    prompts: str = "runs/heads/data/held_out.jsonl"  # conversations; the last of the file, which chose no checkpoint
    sources: list[str] = []  # of these prompts, as many of each (`prompts.sources` of the data); []: of all
    num_prompts: Annotated[int, Field(ge=2)] = 12  # an interval over prompts needs two
    max_new_tokens: Annotated[int, Field(ge=2)] = 64  # an answer ends there, or where plain decoding ends the text before
    lossless: LosslessConfig = LosslessConfig()  # of it only tie_noise is read
    # The engine's tokens per target step over ours, on the prompts that got the same tokens, may be so far from 1. Both sides
    # count the same text, so chance has little part in it: hidden states taken one block off cost 6 %.
    tau_tolerance: PositiveFloat = 0.02
    bootstrap_samples: PositiveInt = 2000
    threads: PositiveInt = 1  # of each engine; two busy OpenMP programs on the same cores slow each other down greatly
    timeout_seconds: PositiveFloat = 1800.0  # for one run of an engine
    environments: str = ".cache/venvs"  # where the engines' own environments are
    output: str = "docs/results/serve.json"
