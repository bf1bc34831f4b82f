"""A real engine for slow tests: vLLM in an environment of its own, serving a saved copy of a target."""

from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.check.vllm_server import ENVIRONMENT, open_vllm, serving

START_SECONDS = 600
CPU_CONNECTOR = Path(__file__).with_name("vllm_cpu_connector.py")  # goes where the engine imports from
ON_CPU = {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": CPU_CONNECTOR.stem}


@contextmanager
def vllm_serving(target, folder, *, dtype, flags=(), name="smollm2", variables=None):
    """Run vLLM on a target, called `name` there, while the block lasts; gives the address of its API.

    `folder` takes the model and the engine's log.
    """
    command = ENVIRONMENT / "bin" / "vllm"
    if not command.exists():
        pytest.fail(f"{command} is missing; make serve-check installs it")
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    options = [str(folder / "target"), "--served-model-name", name, "--dtype", dtype, *flags]
    with serving(open_vllm(command), options, folder / "log", seconds=START_SECONDS, variables=variables) as url:
        yield f"{url}/v1"
