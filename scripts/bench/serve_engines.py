"""Engines that answer prompts with an exported draft, greedily and one at a time, and count rounds and accepted drafts."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from configs.runtime.files import read_json, write_json
from scripts.check.vllm_check import read_line
from scripts.check.vllm_server import Vllm, open_vllm, serving, settled_counters

START_SECONDS, ANSWER_SECONDS = 300.0, 600.0
THREADS = 1  # of each engine; two busy OpenMP programs on the same cores slow each other down greatly
LLAMA_COUNTER = re.compile(r"^llamacpp:spec_decode_num_(drafts|accepted_tokens)_total (\S+)$", re.MULTILINE)


class Counts(NamedTuple):
    rounds: int
    accepted: int


class Answer(NamedTuple):
    tokens: tuple[int, ...]  # as many as asked for, or more
    counts: Counts


@dataclass(frozen=True, kw_only=True)
class Job:
    """What an engine is to answer, and with what."""

    target: Path
    dtype: str
    draft: Path  # the export
    serve: str  # the text of its serve.txt
    num_speculative_tokens: int
    prompts: Sequence[tuple[Sequence[int], int]]  # tokens, and how many the answer has; no end-of-text ends it
    environment: Path  # the engine's own
    folder: Path  # where the target is kept in the engine's form; logs and files of this draft lie beside the export

    @property
    def longest(self) -> int:
        return max(len(tokens) + length for tokens, length in self.prompts)


Run = Callable[[Job], tuple[str, list[Answer]]]  # returns the engine's version and its answers


@dataclass(frozen=True, kw_only=True)
class Engine:
    form: str  # what an export for it is called (`draftsmith export --to`)
    run: Run
    needs: str  # a file of its environment without which it is not installed
    cuts: bool = False  # it drafts no further than an answer goes
    whole_head: tuple[str, ...] = ()  # kinds of draft for which it takes the target's whole output head


def count_rounds(accepted: Iterable[int], length: int) -> Counts:
    """Count the rounds that an answer of `length` takes, the last one whole, by the drafts accepted in each in order."""
    tokens, rounds, total = 1, 0, 0
    for number in accepted:
        if tokens >= length:
            break
        tokens, rounds, total = tokens + number + 1, rounds + 1, total + number
    if tokens < length:
        raise ValueError(f"the rounds bring {tokens} tokens, and the answer has {length}")
    return Counts(rounds, total)


def run_vllm(job: Job) -> tuple[str, list[Answer]]:
    engine, line = open_vllm(job.environment / "bin" / "vllm"), read_line(job.serve)
    # Else a server takes settings of drawing from the target's folder, and reads of a prompt only what is new.
    options = [*line.options, "--dtype", job.dtype, "--generation-config", "vllm", "--no-enable-prefix-caching"]
    variables = {**line.variables, "OMP_NUM_THREADS": str(THREADS)}
    asked = {"model": line.options[0], "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with serving(engine, options, _log(job), seconds=START_SECONDS, variables=variables) as url:
        before, answers = settled_counters(url), []
        for tokens, length in job.prompts:
            found = _post(f"{url}/v1/completions", asked | {"prompt": list(tokens), "max_tokens": length})
            now = settled_counters(url)
            gained, before = now - before, now
            counts = Counts(gained["drafts"], gained["accepted_tokens"])
            answers.append(Answer(tuple(found["choices"][0]["token_ids"]), counts))
    return engine.version, answers


def run_llama_cpp(job: Job) -> tuple[str, list[Answer]]:
    """Serve the target; generation stops at an end-of-text, which plain answers have at their end alone."""
    kind = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[job.dtype]
    target, program = job.folder / "target.gguf", str(job.environment / "bin" / "llama-server")
    if not target.exists():
        converter = [sys.executable, str(job.environment / "source" / "convert_hf_to_gguf.py"), str(job.target)]
        environment = {**os.environ, "PYTHONPATH": str(job.environment / "python")}
        subprocess.run([*converter, "--outfile", str(target), "--outtype", kind], env=environment, check=True)
    line = next(line for line in job.serve.splitlines() if line.startswith("llama-server "))
    options = [str(target) if word == "target.gguf" else word for word in shlex.split(line)[1:]]
    options += ["--ctx-size", str(job.longest + 64), "--parallel", "1", "--metrics"]
    options += ["--threads", str(THREADS), "--threads-batch", str(THREADS)]
    for cache in ("cache-type", "spec-draft-type"):
        options += [f"--{cache}-k", kind, f"--{cache}-v", kind]
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    version = re.search(r"version: (.+)", said.stderr + said.stdout)
    # It is started, asked whether it is ready, and ended as vLLM is.
    server = Vllm(server=(program,), version=version[1] if version else "unknown", is_cpu=False)
    asked = {"temperature": 0, "samplers": ["temperature"], "cache_prompt": False, "return_tokens": True}
    with serving(server, options, _log(job), seconds=START_SECONDS) as url:
        before, answers = _llama_counts(url), []
        for tokens, length in job.prompts:
            found = _post(f"{url}/completion", asked | {"prompt": list(tokens), "n_predict": length})
            now = _llama_counts(url)
            counts, before = Counts(now.rounds - before.rounds, now.accepted - before.accepted), now
            answers.append(Answer(tuple(found["tokens"]), counts))
    return server.version, answers


def _llama_counts(url: str) -> Counts:
    said = httpx2.get(f"{url}/metrics", timeout=ANSWER_SECONDS, trust_env=False).raise_for_status().text
    counters = {name: int(float(value)) for name, value in LLAMA_COUNTER.findall(said)}
    return Counts(counters.get("drafts", 0), counters.get("accepted_tokens", 0))


def run_openvino(job: Job) -> tuple[str, list[Answer]]:
    target, program = job.folder / "target_openvino", job.environment / "bin"
    if not target.exists():
        weights = {"float32": "fp32", "float16": "fp16"}[job.dtype]
        convert = ["export", "openvino", "--model", str(job.target), "--task", "text-generation-with-past"]
        subprocess.run([str(program / "optimum-cli"), *convert, "--weight-format", weights, str(target)], check=True)
    files = [job.draft.with_name(name) for name in ("job.json", "answers.json")]
    given: dict[str, Any] = {"target": str(target), "draft": str(job.draft), "threads": THREADS}
    given |= {"precision": {"float32": "f32", "float16": "f16"}[job.dtype], "prompts": job.prompts}
    write_json(files[0], given | {"num_speculative_tokens": job.num_speculative_tokens})
    driver = Path(__file__).with_name("serve_openvino.py")
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
    subprocess.run([str(program / "python"), str(driver), *map(str, files)], env=environment, check=True)
    found = read_json(files[1], "answers of OpenVINO")
    lengths = [length for _, length in job.prompts]
    answers = [
        Answer(tuple(tokens), count_rounds(accepted, length))
        for (tokens, accepted), length in zip(found["answers"], lengths, strict=True)
    ]
    return found["version"], answers


def _log(job: Job) -> Path:
    return job.draft.with_name("log")


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = httpx2.post(url, json=body, timeout=ANSWER_SECONDS, trust_env=False).raise_for_status().json()
    return found


ENGINES = {
    "vllm": Engine(form="vllm", run=run_vllm, needs="bin/vllm", whole_head=("mtp",)),
    "llama_cpp": Engine(form="gguf", run=run_llama_cpp, needs="bin/llama-server", cuts=True, whole_head=("dflash",)),
    "openvino": Engine(form="openvino", run=run_openvino, needs="bin/python"),
}
