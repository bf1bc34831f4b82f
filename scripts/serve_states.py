"""Print the lines that start servers of hidden states, for a shell with vLLM.

    eval "$(draftsmith serve-states --config configs/heads/eagle3.yaml \\
        --set 'target.states.urls=[http://localhost:8000/v1]' target.states.path=runs/states -- --tensor-parallel-size 8)"

The recipe is one of `train/heads.py` or `train/distill.py`; a target cache for it takes the same servers. There is one line for
each port in `target.states.urls`, all but the last in the background; what stands after `--` is added to each. Where the urls
are this machine's, servers listen on 127.0.0.1 alone. Otherwise they listen on every interface and ask for the key in the
variable that `target.states.api_key_variable` names.  Of the target only the config is read.

vLLM calls the method by which it keeps hidden states a speculative one, with the taps as those of a draft. The states' numbers
stand in the name under which the model is served too, where training finds them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from configs.runtime.command import run_command
from configs.runtime.errors import ConfigError
from configs.schema.commands.planning import PlanConfig
from scripts.plan import schema_of

CONNECTOR = {"kv_connector": "ExampleHiddenStatesConnector"}  # of vLLM itself, for GPUs
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def main(config: PlanConfig, arguments: argparse.Namespace) -> None:
    """Print the lines."""
    print("\n".join(serve_lines(config, arguments.options)))


def serve_lines(config: PlanConfig, options: Sequence[str]) -> list[str]:
    """Return the lines for a shell that start a server on each port of the recipe's: all but the last in the background."""
    # torch and transformers take seconds to import: a mistyped key is reported before that.
    from distill.server.states import SERVED_AS
    from heads.frozen.hidden_states import num_blocks
    from heads.frozen.identity import PREFIX, locate
    from train.plan.models import plan_models

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
    revision = [] if target.revision is None else ["--revision", target.revision]
    served = ["--served-model-name", SERVED_AS.format(taps="-".join(map(str, taps))), "--dtype", target.dtype]
    kept = states_options(taps, states.path)
    command = ["vllm", "serve", name, *revision, *served, *kept, "--max-model-len", str(longest)]
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


def states_options(taps: Sequence[int], path: str, connector: Mapping[str, str] = CONNECTOR) -> list[str]:
    """Return the options by which vLLM keeps these states, and a connector writes them to a folder."""
    kept = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(taps)}}
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": kept}
    transfer = {**connector, "kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": path}}
    return ["--speculative-config", json.dumps(method), "--kv-transfer-config", json.dumps(transfer)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a line takes beside a config."""
    parser.add_argument("options", nargs="*", metavar="-- OPTION", help="of vllm serve, added to each line")


if __name__ == "__main__":
    description = "Print the line that starts a server of hidden states for a recipe."
    sys.exit(run_command(schema_of(sys.argv[1:]), main, description=description, add_arguments=add_arguments))
