"""The commands that read a recipe: `plan` says what it takes, `serve-states` how to start servers of its hidden states."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest

from configs.runtime.command import BAD_INPUT, DONE, run_command
from configs.schema.commands.planning import HardwareConfig, PlanDistillConfig, PlanHeadsConfig
from scripts import serve_states
from scripts.plan import main, schema_of
from train.plan.page import launch_line
from train.plan.plan import ALONE, SPREADING, Sharing

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def at_home(monkeypatch):
    monkeypatch.chdir(ROOT)


def run(*argv):
    return run_command(schema_of(list(argv)), main, description="", argv=list(argv), add_arguments=lambda parser: None)


@pytest.mark.parametrize(
    ("argv", "schema"),
    [
        ([], PlanHeadsConfig),
        (["--config", "configs/heads/eagle3.yaml"], PlanHeadsConfig),
        (["--config", "configs/distill/draft_lm.yaml"], PlanDistillConfig),
    ],
)
def test_the_recipe_says_what_it_is_one_of(argv, schema):
    assert schema_of(argv) is schema


def test_the_page_says_what_fits_and_what_does_not(capsys):
    assert run("--config", "configs/plan/eagle3_70b.yaml") == DONE
    page = capsys.readouterr().out
    assert "70,553,706,496 parameters" in page  # Llama-3-70B's
    assert re.search(r"\| ddp_gpus \| [\d.]+ GiB \| no: more than 71.1 GiB", page)
    assert re.search(r"\| ddp_gpus with target.shards=2 \| [\d.]+ GiB \| no: ", page)
    assert "| one_gpu with target.device_map |" in page
    assert "recipe: take ddp_gpus with target.shards=4" in page
    assert "PROCESSES_PER_NODE=8 scripts/cluster/node.sh train/heads.py --config mine.yaml --set target.shards" in page


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--config", "nosuch.yaml"], "config file not found: nosuch.yaml"),
        (["--set", "target.name=nosuch/", "--set", "data.train=nowhere"], "target.name: nosuch/ has no model config"),
        (["--set", "target.name=configs/plan/llama_8b", "--set", "data.train=nowhere"], "data.train: nowhere does not exist"),
        (["--config", "configs/plan/eagle3_70b.yaml", "--set", "head.draft_vocab_size=200000"], "at most 128256"),
    ],
)
def test_a_mistake_is_one_line(argv, complaint, capsys):
    assert run(*argv) == BAD_INPUT
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


LAUNCH = "accelerate launch --quiet --config_file configs/accelerate/"


@pytest.mark.parametrize(
    ("sharing", "number", "line"),
    [
        (Sharing(recipe="zero2", stage=2), 16, "RECIPE=configs/accelerate/zero2.yaml sbatch --nodes=2 --gpus-per-node=8"),
        (SPREADING, 8, f"{LAUNCH}one_gpu.yaml COMMAND --set target.device_map=auto"),
        (ALONE, 0, f"{LAUNCH}one_process_cpu.yaml COMMAND"),
    ],
)
def test_a_way_that_fits_comes_with_the_line_that_starts_it(sharing, number, line):
    hardware = {"preset": "h100_80gb", "num_accelerators": number} if number else {"preset": "laptop_cpu"}
    assert launch_line(sharing, HardwareConfig(**hardware), "COMMAND").startswith(line)


# --- servers of hidden states -------------------------------------------------------------------------------------------


URLS = "[http://a:8000/v1, http://b:8000/v1, http://b:8001/v1]"
STATES = f"target.states={{urls: {URLS}, path: /shared/of us, api_key_variable: OUR_KEY}}"


def serve(*argv):
    arguments = list(argv)
    return run_command(
        schema_of(arguments), serve_states.main, description="", argv=arguments, add_arguments=serve_states.add_arguments
    )


def options(line):
    words = shlex.split(line)
    return words, {word: after for word, after in itertools.pairwise(words) if word.startswith("--")}


def test_a_line_for_each_port_serves_the_taps_of_the_recipes_head(tmp_path, tiny_run, capsys):
    head = "head={kind: eagle3, taps: [0, 1]}"
    named = ["--set", STATES, f"target.name={tiny_run / 'target'}", "target.dtype=float32", "data.max_length=100", head]
    assert serve(*named, "held_out.decode.max_new_tokens=10") == DONE
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


def test_servers_that_others_reach_ask_for_a_key(tiny_run, capsys):
    named = [f"target.name={tiny_run / 'target'}", "head={kind: medusa}"]
    assert serve("--set", STATES, *named) == DONE
    for line in capsys.readouterr().out.splitlines():
        assert line.startswith('VLLM_API_KEY="${OUR_KEY:?}" ')
        assert "--host 0.0.0.0 " in line
    assert serve("--set", STATES, "target.states.api_key_variable=null", *named) == BAD_INPUT
    assert "target.states.api_key_variable: urls on other machines" in capsys.readouterr().err
    assert serve("--set", *named) == BAD_INPUT
    assert "target.states" in capsys.readouterr().err
    assert serve("--set", "target.states={urls: [http://localhost:8000/v1], path: a}", *named) == DONE
    line = capsys.readouterr().out
    assert line.startswith("vllm serve ")  # without a key, for this machine alone
    assert "--host 127.0.0.1 " in line
