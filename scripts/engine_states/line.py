"""The command line of `vllm serve` that gives the states a recipe's training reads.

vLLM calls the method by which it keeps hidden states a speculative one, with the taps as those of a draft. The states' numbers
stand in the name under which the model is served too, where training finds them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from configs.runtime.errors import ConfigError
from configs.schema.commands.planning import PlanConfig
from distill.server.states import SERVED_AS
from heads.frozen.hidden_states import num_blocks
from heads.frozen.identity import PREFIX, locate
from train.plan.models import plan_models

LOOPBACK = ("localhost", "127.0.0.1", "::1")
CONNECTOR = Path(__file__).resolve().with_name("vllm_cpu_connector.py")


def serve_lines(config: PlanConfig, *, cpu: bool = False, options: Sequence[str] = ()) -> list[str]:
    """Return the lines for a shell that start a server on each port of the recipe's: all but the last in the background."""
    states = config.target.states
    if states is None:
        raise ConfigError("target.states: the recipe names no servers; give urls and path there")
    models = plan_models(config)
    config = models.config
    taps = sorted({*(models.taps or ()), num_blocks(models.target)})
    decode = config.held_out.decode
    # A text, its answer and drafts, and the token that every request generates.
    longest = config.data.max_length + decode.max_new_tokens + decode.num_speculative_tokens + 1
    target = config.target
    name = str(locate(target)) if target.name.startswith(PREFIX) else target.name
    where = ["env", f"PYTHONPATH={CONNECTOR.parent}"] if cpu else []
    # vLLM's own command asks for a package called vllm, which the one for CPUs is not; this is what it runs.
    program = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", name] if cpu else ["vllm", "serve", name]
    revision = [] if target.revision is None else ["--revision", target.revision]
    served = ["--served-model-name", SERVED_AS.format(taps="-".join(map(str, taps))), "--dtype", target.dtype]
    kept = states_options(taps, states.path, cpu=cpu)
    command = [*where, *program, *revision, *served, *kept, "--max-model-len", str(longest)]
    places = list(map(urlsplit, states.urls))
    host, front = "127.0.0.1", ""
    if any(place.hostname not in LOOPBACK for place in places):
        if states.api_key_variable is None:
            raise ConfigError(
                "target.states.api_key_variable: urls on other machines mean servers that a network reaches; name the "
                "environment variable that holds the key they are to ask for"
            )
        host, front = "0.0.0.0", f'VLLM_API_KEY="${{{states.api_key_variable}:?}}" '
    ports = dict.fromkeys(place.port or 80 for place in places)
    lines = [front + shlex.join([*command, "--host", host, "--port", str(port), *options]) for port in ports]
    return [*(f"{line} &" for line in lines[:-1]), lines[-1]]


def states_options(taps: Sequence[int], path: str, *, cpu: bool) -> list[str]:
    """Return the options by which vLLM keeps these states and writes them to a folder."""
    kept = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(taps)}}
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": kept}
    own = {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": CONNECTOR.stem}
    common = {"kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": path}}
    transfer = common | (own if cpu else {"kv_connector": "ExampleHiddenStatesConnector"})
    return ["--speculative-config", json.dumps(method), "--kv-transfer-config", json.dumps(transfer)]
