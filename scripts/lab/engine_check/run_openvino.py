"""OpenVINO GenAI on a job of `engine_check.engines`: its metrics say how many tokens each step of the target brought."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy
import openvino
import openvino_genai

WEIGHT_FORMATS = {"float32": "fp32", "float16": "fp16"}
PRECISIONS = {"float32": "f32", "float16": "f16"}
WARM_UP_TOKENS = 8
CACHE_GIB = 1


def main(job_file: str, answers_file: str) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    pipeline = load(job, converted_target(job))
    answer(pipeline, job, {**job["prompts"][0], "length": WARM_UP_TOKENS})
    answers = [answer(pipeline, job, prompt) for prompt in job["prompts"]]
    value = {"version": metadata.version("openvino-genai"), "answers": answers}
    Path(answers_file).write_text(json.dumps(value), encoding="utf-8")


def converted_target(job: dict[str, Any]) -> Path:
    path = Path(job["folder"]).parent / "target_openvino"
    if not path.exists():
        command = [str(Path(job["environment"]) / "bin" / "optimum-cli"), "export", "openvino", "--model", job["target"]]
        command += ["--task", "text-generation-with-past", "--weight-format", WEIGHT_FORMATS[job["dtype"]], str(path)]
        subprocess.run(command, check=True)
    return path


def load(job: dict[str, Any], target: Path) -> Any:
    precision = PRECISIONS[job["dtype"]]
    properties = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    properties["INFERENCE_NUM_THREADS"] = job["threads"]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.enable_prefix_caching = False  # else the warm-up has read the first prompt already
    draft = {}
    if job["draft"] is not None:
        draft["draft_model"] = openvino_genai.draft_model(job["draft"], "CPU", **properties)
    return openvino_genai.LLMPipeline(str(target), "CPU", scheduler_config=scheduler, **properties, **draft)


def answer(pipeline: Any, job: dict[str, Any], prompt: dict[str, Any]) -> dict[str, Any]:
    """Continue one prompt greedily; with a draft, return what each step of the target after the prompt's kept of its drafts."""
    drafts = job["num_speculative_tokens"]
    ids_1T = openvino.Tensor(numpy.array([prompt["tokens"]], dtype=numpy.int64))
    config = openvino_genai.GenerationConfig()
    config.do_sample, config.ignore_eos, config.apply_chat_template = False, True, False
    # With room beyond the answer's end no round is cut short for want of it.
    config.max_new_tokens = prompt["length"] + (0 if job["draft"] is None else 2 * (drafts + 1))
    if job["draft"] is not None:
        config.num_assistant_tokens = drafts
    started = time.perf_counter()
    output = pipeline.generate(ids_1T, config)
    found = {"tokens": output.tokens[0], "seconds": time.perf_counter() - started}
    if job["draft"] is None:
        return found | {"rounds": 0, "accepted": 0}
    _, *brought = output.extended_perf_metrics.raw_metrics.m_batch_sizes  # the first step is the prompt's, without drafts
    return found | {"accepted_by_round": [tokens - 1 for tokens in brought]}


if __name__ == "__main__":
    main(*sys.argv[1:])
