"""llama.cpp's server on a job of `engine_check.engines`: its own counters say how many drafts were accepted.

Generation stops at an end-of-text, because `ignore_eos` would forbid that token; plain answers have one at their end.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

COUNTERS = ("llamacpp:spec_decode_num_drafts_total", "llamacpp:spec_decode_num_accepted_tokens_total")
OUT_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
WARM_UP_TOKENS = 8
START_SECONDS = 300


def main(job_file: str, answers_file: str) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    place = Path(job["environment"])
    url, process = start(job, place, target_gguf(job, place))
    try:
        answer(url, {**job["prompts"][0], "length": WARM_UP_TOKENS})
        answers = [answer(url, prompt) for prompt in job["prompts"]]
    finally:
        process.terminate()
        process.wait()
    Path(answers_file).write_text(json.dumps({"version": version(place), "answers": answers}), encoding="utf-8")


def target_gguf(job: dict[str, Any], place: Path) -> Path:
    path = Path(job["folder"]).parent / "target.gguf"
    if not path.exists():
        command = [sys.executable, str(place / "source" / "convert_hf_to_gguf.py"), job["target"], "--outfile", str(path)]
        command += ["--outtype", OUT_TYPES[job["dtype"]]]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(place / "python")}, check=True)
    return path


def start(job: dict[str, Any], place: Path, target: Path) -> tuple[str, subprocess.Popen[bytes]]:
    line = "llama-server --model target.gguf"
    if job["draft"] is not None:
        line = next(line for line in job["serve"].splitlines() if line.startswith("llama-server "))
    words = [str(target) if word == "target.gguf" else word for word in shlex.split(line)[1:]]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    longest = max(len(prompt["tokens"]) + prompt["length"] for prompt in job["prompts"])
    cache = OUT_TYPES[job["dtype"]]
    options = ["--host", "127.0.0.1", "--port", port, "--ctx-size", longest + 64, "--parallel", 1, "--metrics"]
    options += ["--threads", job["threads"], "--threads-batch", job["threads"]]
    options += ["--cache-type-k", cache, "--cache-type-v", cache]
    if job["draft"] is not None:
        options += ["--spec-draft-type-k", cache, "--spec-draft-type-v", cache]
    process = subprocess.Popen([str(place / "bin" / "llama-server"), *words, *map(str, options)])
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_SECONDS
    while not is_ready(url):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError("llama-server did not start")
        time.sleep(0.2)
    return url, process


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as reply:
            return reply.status == 200
    except (urllib.error.URLError, ConnectionError):
        return False


def answer(url: str, prompt: dict[str, Any]) -> dict[str, Any]:
    """Continue one prompt greedily, and read what the counters gained."""
    asked = {"prompt": prompt["tokens"], "n_predict": prompt["length"], "temperature": 0, "samplers": ["temperature"]}
    asked |= {"cache_prompt": False, "return_tokens": True}
    before = counters(url)
    started = time.perf_counter()
    request = urllib.request.Request(f"{url}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        found = json.load(reply)
    seconds = time.perf_counter() - started
    rounds, accepted = (after - sooner for after, sooner in zip(counters(url), before, strict=True))
    return {"tokens": found["tokens"], "rounds": rounds, "accepted": accepted, "seconds": seconds}


def counters(url: str) -> list[int]:
    """Return how many rounds were drafted for, and how many drafts accepted, since the start; 0 where nothing is drafted."""
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    totals = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    return [int(float(totals.get(name, 0))) for name in COUNTERS]


def version(place: Path) -> str:
    said = subprocess.run([str(place / "bin" / "llama-server"), "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"version: (.+)", said.stderr + said.stdout)
    return found[1] if found else "unknown"


if __name__ == "__main__":
    main(*sys.argv[1:])
