"""The command that prints how to start servers of hidden states."""

import itertools
import json
import os
import re
import shlex
import subprocess

from configs.runtime.command import BAD_INPUT, DONE, run_command
from scripts.plan import schema_of
from scripts.serve_states import __main__ as serve_states
from scripts.serve_states.__main__ import CONNECTOR, add_arguments, main

URLS = "[http://a:8000/v1, http://b:8000/v1, http://b:8001/v1]"
STATES = f"target.states={{urls: {URLS}, path: /shared/of us, api_key_variable: OUR_KEY}}"


def run(*argv):
    return run_command(schema_of(list(argv)), main, description="", argv=list(argv), add_arguments=add_arguments)


def options(line):
    words = shlex.split(line)
    return words, {word: after for word, after in itertools.pairwise(words) if word.startswith("--")}


def test_a_line_for_each_port_serves_the_taps_of_the_recipes_head(tmp_path, tiny_run, capsys):
    head = "head={kind: eagle3, taps: [0, 1]}"
    named = ["--set", STATES, f"target.name={tiny_run / 'target'}", "target.dtype=float32", "data.max_length=100", head]
    assert run(*named, "held_out.decode.max_new_tokens=10") == DONE
    lines = capsys.readouterr().out.splitlines()
    (words, first), (_, second) = map(options, lines)
    assert words[1:4] == ["vllm", "serve", str(tiny_run / "target")]
    assert (first["--port"], second["--port"]) == ("8000", "8001")
    assert first["--served-model-name"] == "states-0-1-2"  # the last block's, too
    assert first["--dtype"] == "float32"
    assert int(first["--max-model-len"]) == 100 + 10 + 3 + 1
    kept = json.loads(first["--speculative-config"])
    assert kept["method"] == "extract_hidden_states"
    assert kept["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    transfer = json.loads(first["--kv-transfer-config"])
    assert transfer["kv_connector"] == "ExampleHiddenStatesConnector"
    assert transfer["kv_connector_extra_config"]["shared_storage_path"] == "/shared/of us"


def test_on_a_cpu_the_connector_of_this_project_is_named(tiny_run, capsys):
    assert run("--cpu", "--set", STATES, f"target.name={tiny_run / 'target'}", "head={kind: medusa}") == DONE
    words, given = options(capsys.readouterr().out.splitlines()[0])
    transfer = json.loads(given["--kv-transfer-config"])
    assert given["--served-model-name"] == "states-2"
    assert f"PYTHONPATH={CONNECTOR.parent}" in words
    assert (CONNECTOR.parent / f"{transfer['kv_connector_module_path']}.py").is_file()
    assert f"class {transfer['kv_connector']}(" in CONNECTOR.read_text()


def test_the_example_starts_all_servers_at_once_on_this_machine_alone(tiny_run, tmp_path, capsys):
    example = re.search(r"serve-states (.*?)\)\"", serve_states.__doc__, re.DOTALL).group(1).replace("\\\n", " ")
    several = example.replace("8000/v1]", "8000/v1, http://127.0.0.1:8001/v1]")
    assert run(*shlex.split(several), "--served-model-name=x") == DONE
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "vllm").write_text(f'#!/bin/sh\necho "$VLLM_API_KEY" "$@" >> {tmp_path}/started\n')
    (tools / "vllm").chmod(0o755)
    lines = capsys.readouterr().out
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", 'eval "$1"; wait', "sh", lines], env=environment, check=True)
    assert [line.endswith(" &") for line in lines.splitlines()] == [True, False]
    places = [line.split("--host ")[1] for line in sorted((tmp_path / "started").read_text().splitlines())]
    assert places == [f"127.0.0.1 --port {port} --tensor-parallel-size 8 --served-model-name=x" for port in (8000, 8001)]


def test_servers_that_others_reach_ask_for_a_key(tiny_run, capsys):
    named = [f"target.name={tiny_run / 'target'}", "head={kind: medusa}"]
    assert run("--set", STATES, *named) == DONE
    for line in capsys.readouterr().out.splitlines():
        assert line.startswith('VLLM_API_KEY="${OUR_KEY:?}" ')
        assert "--host 0.0.0.0 " in line
    assert run("--set", STATES, "target.states.api_key_variable=null", *named) == BAD_INPUT
    assert "target.states.api_key_variable: urls on other machines" in capsys.readouterr().err
    assert run("--set", *named) == BAD_INPUT
    assert "target.states: the recipe names no servers" in capsys.readouterr().err
