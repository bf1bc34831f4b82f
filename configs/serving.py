"""The config of `scripts/serve_check.py`: which drafts are tried in which engines, and on what. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.decoding import TargetConfig
from configs.evaluating import LosslessConfig
from configs.settings import PositiveFloat, PositiveInt, Settings

Share = Annotated[float, Field(ge=0, le=1)]

# Engines that are run here, and those whose folders are only written and checked.
RunEngine = Literal["vllm", "transformers", "llama_cpp"]
CheckedEngine = Literal["sglang", "tensorrt_llm"]


class ServeCase(Settings):
    """A draft in an engine."""

    artifact: str  # a folder written by train/distill.py or train/heads.py
    engine: RunEngine | CheckedEngine | None  # None: no engine takes a draft of this kind, and the table says so
    num_speculative_tokens: PositiveInt | None = None  # None: what the artifact says, of DFlash a whole block
    # How many of the prompts that got the same tokens must have taken the same rounds and accepted drafts too. Below 1 because
    # drafts that are nearly tied fall either way, and because an engine may depart from ours in a known detail. A draft that is
    # exported wrong changes the counts of almost every prompt. Ask for 1.0 where they have been seen to be equal.
    same_counts_share: Share = 0.6


class ServeCheckConfig(Settings):
    """`scripts/serve_check.py`: drafts in real engines, beside our decoder on the same prompts."""

    cases: list[ServeCase] = []  # configs/serve/ has some
    # Greedy answers are compared in float32, where near ties are rare; in bfloat16 more of them may differ.
    target: TargetConfig = TargetConfig(dtype="float32", device="cpu")
    prompts: str = "runs/heads/data/held_out.jsonl"  # conversations; the last of the file, which chose no checkpoint
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
