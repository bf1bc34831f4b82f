"""Exported drafts in real engines beside our decoder: `python -m scripts.bench.serve --config scripts/bench/configs/serve/...`.

One rule for both sides. An answer has as many tokens as plain decoding here gives it, its end-of-text or the limit included.
Its first token comes from the prompt's forward; every later target step is a round. The round that reaches the answer's length
counts whole, with the drafts accepted beyond it, because engines count so: tau = 1 + accepted drafts / rounds, over prompts.
The interval of tau alone would not tell a wrong export, so counts are compared prompt by prompt as well.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from pydantic import Field

from configs.runtime.command import DONE, GATE_FAILED, run_command
from configs.runtime.errors import InputError
from configs.runtime.loading import load_config
from configs.schema.base import PositiveInt, Settings, Share
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import LosslessConfig
from configs.schema.target import TargetConfig
from configs.schema.training import HeadsConfig
from eval.decoder.decode import Request, check_decodable, decode
from eval.stats import ratio_interval
from eval.teacher_forcing import check_tokens
from heads.artifact import load_draft
from heads.formats.exporting.exporter import SERVE_FILE, export
from heads.formats.exporting.source import TargetFolder, read_source
from heads.frozen.identity import locate
from heads.frozen.loading import Target, load_target
from heads.metadata import read_metadata
from heads.modules.output_head import DraftHead
from scripts.bench.harness import held_out_rows, requests_of, run_module, write_results
from scripts.bench.serve_engines import ENGINES, THREADS, Counts, Engine, Job, count_rounds

log = logging.getLogger("draftsmith")

AGREES, DISAGREES = "agrees", "disagrees"
TAU_TOLERANCE = 0.02  # the engine's tau over ours, on the prompts that got the same tokens, may be so far from 1


class ServeCase(Settings):
    """A draft in an engine."""

    draft: str  # the artifact of a trained draft, or a recipe of `train/heads.py`, by which one is trained where it is not
    engine: Literal["vllm", "llama_cpp", "openvino"]
    # How many of the prompts that got the same tokens must have taken the same rounds and accepted drafts too. Below 1 because
    # drafts that are nearly tied fall either way; a draft that is exported wrong changes the counts of almost every prompt.
    same_counts_share: Share = 0.6

    def trained(self) -> Path:
        """Return the folder of the draft, whose recipe is run where that was not done."""
        if not self.draft.endswith(".yaml"):
            return Path(self.draft)
        output = Path(load_config(HeadsConfig, self.draft).output)
        if not (output / "outcome.json").is_file():
            run_module("train.heads", "--config", self.draft)
        return output / "artifact"


class ServeBenchConfig(Settings):
    """`python -m scripts.bench.serve`: drafts in real engines, beside our decoder on the same prompts."""

    cases: list[ServeCase] = Field(min_length=1)
    # Greedy answers are compared in float32, where near ties are rare; in bfloat16 more of them may differ.
    target: TargetConfig = TargetConfig(dtype="float32", device="cpu")
    prompts: str = "runs/heads/data/held_out.jsonl"  # conversations; the last of the file, which chose no checkpoint
    num_prompts: PositiveInt = Field(default=12, ge=2)  # an interval over prompts needs two
    max_new_tokens: PositiveInt = 64
    environments: str = ".cache/venvs"  # where the engines' own environments are
    output: str = "docs/results/serve.json"


def check_engines(config: ServeBenchConfig) -> int:
    for engine in {case.engine for case in config.cases}:
        if not (needed := Path(config.environments) / engine / ENGINES[engine].needs).exists():
            raise InputError(f"{engine} is not installed: {needed} is missing; `make serve-check` installs it")
    with TemporaryDirectory(prefix="serve-check-") as scratch:
        bench = Bench(config, Path(scratch))
        rows = [bench.check(number, case) for number, case in enumerate(config.cases)]
    write_results(config.output, "serve", rows=rows, ratios={}, config=config)
    return GATE_FAILED if any(row["verdict"] == DISAGREES for row in rows) else DONE


class Bench:
    """The target, prompts and plain answers that all cases share."""

    def __init__(self, config: ServeBenchConfig, scratch: Path) -> None:
        torch.set_num_threads(THREADS)
        self.config, self.scratch = config, scratch
        self.requests = requests_of(held_out_rows(config.prompts, config.num_prompts))
        self.target = load_target(config.target)
        check_decodable(self.target, self.requests)
        self.folder = locate(config.target).resolve()
        plain = DecodeConfig(num_speculative_tokens=0, max_new_tokens=config.max_new_tokens)
        self.plain = [decode(self.target, [request], plain)[0][0] for request in self.requests]

    def check(self, number: int, case: ServeCase) -> dict[str, Any]:
        """Export a draft, run it in its engine, and compare."""
        engine, artifact = ENGINES[case.engine], case.trained()
        kind = read_metadata(artifact).kind
        dtype, place = self.target.model.dtype, TargetFolder(self.folder, str(self.folder))
        source = read_source(artifact, place, dtype=dtype)
        out, drafts = self.scratch / f"case_{number}" / "draft", source.num_speculative_tokens  # vLLM reads this path's words
        out.parent.mkdir()
        export(source, engine.form, out)
        prompts = [(request.tokens, len(plain.tokens)) for request, plain in zip(self.requests, self.plain, strict=True)]
        job = Job(
            target=self.folder,
            dtype=self.config.target.dtype,
            draft=out,
            serve=(out / SERVE_FILE).read_text(encoding="utf-8"),
            num_speculative_tokens=drafts,
            prompts=prompts,
            environment=(Path(self.config.environments) / case.engine).absolute(),
            folder=self.scratch,
        )
        version, answers = engine.run(job)
        ours = count_ours(self.target, job, artifact, engine, kind)
        served = [
            replace(plain, mode="engine", tokens=answer.tokens[: len(plain.tokens)])
            for plain, answer in zip(self.plain, answers, strict=True)
        ]
        wrong = len(check_tokens(self.target, self.plain, served, LosslessConfig().tie_noise).wrong_answers)
        same = [one.tokens == other.tokens for one, other in zip(self.plain, served, strict=True)]
        row: dict[str, Any] = {"family": kind, "engine": case.engine, "engine_version": version}
        row |= {"dtype": self.config.target.dtype, "num_speculative_tokens": drafts, "prompts": len(ours)}
        row |= self.compare(case, ours, [answer.counts for answer in answers], same, wrong)
        log.info("%s", ", ".join(f"{name} {value}" for name, value in row.items()))
        return row

    def compare(
        self, case: ServeCase, ours: Sequence[Counts], theirs: Sequence[Counts], same: Sequence[bool], wrong: int
    ) -> dict[str, Any]:
        """Return both taus, how many prompts have the same counts, and the verdict."""
        pairs = [(own, other) for own, other, is_same in zip(ours, theirs, same, strict=True) if is_same]
        rounds, steps = [each.rounds for each in ours], [each.rounds + each.accepted for each in ours]
        interval = ratio_interval(steps, rounds)
        ratio = tau_of([other for _, other in pairs]) / tau_of([own for own, _ in pairs]) if pairs else None
        share = sum(own == other for own, other in pairs) / len(pairs) if pairs else None
        engine = tau_of(theirs)
        inside = interval.low is not None and interval.high is not None and interval.low <= engine <= interval.high
        equal = ratio is not None and abs(ratio - 1) <= TAU_TOLERANCE and (share or 0) >= case.same_counts_share
        found = {"tau_ours": interval.point, "tau_low": interval.low, "tau_high": interval.high, "tau_engine": engine}
        found |= {"tau_ratio": ratio, "same_tokens": sum(same) / len(same), "near_ties": len(same) - sum(same) - wrong}
        return found | {"same_counts": share, "verdict": AGREES if inside and equal and not wrong else DISAGREES}


def count_ours(target: Target, job: Job, artifact: Path, engine: Engine, kind: str) -> list[Counts]:
    """Decode every prompt with an artifact's drafts, as far as the engine drafts and by the output head it takes."""
    endless = replace(target, eos_token_ids=())
    proposer: Any = load_draft(str(artifact), target.identity, target.model).proposer
    if kind in engine.whole_head:
        proposer.module.lm_head = DraftHead(target.model, None, trainable=False)
    counts, drafts = [], job.num_speculative_tokens
    for tokens, length in job.prompts:
        # With room beyond the answer's end no round is cut short; where one is, rounds without drafts do not count.
        config = DecodeConfig(num_speculative_tokens=drafts, max_new_tokens=length + (0 if engine.cuts else drafts))
        (own,), _ = decode(endless, [Request(prompt_id="", category="", tokens=tuple(tokens))], config, proposer)
        accepted = [each.num_accepted for each in own.rounds if each.drafted or not engine.cuts]
        counts.append(Counts(len(accepted), sum(accepted)) if engine.cuts else count_rounds(accepted, length))
    return counts


def tau_of(counts: Sequence[Counts]) -> float:
    return 1 + sum(each.accepted for each in counts) / max(1, sum(each.rounds for each in counts))


if __name__ == "__main__":
    sys.exit(run_command(ServeBenchConfig, check_engines, description=__doc__))
