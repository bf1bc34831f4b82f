"""scripts/cluster/node.sh with NUM_NODES=MIN:MAX: a process is lost, or a node, whose launcher and processes are killed."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from configs.runtime.command import DONE
from scripts.check.vllm_server import free_port
from tests.faults.conftest import start_pair
from tests.faults.test_cluster import CLUSTER, LENGTHS, ROOT, environment, written
from tests.support.launched_runs import largest_difference, read_metric
from train.launch import run_distillation

TOLERANCE = 1e-5  # of a loss or a gradient's norm, as a share; of a weight
PATIENCE = "last_call_timeout=4,keep_alive_interval=1"  # of torchrun, in seconds; else it takes most of a minute to miss a node
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def test_an_elastic_launch_refuses_a_recipe_that_it_inherits(tmp_path):
    command = ["bash", str(CLUSTER / "node.sh"), "train/heads.py"]
    variables = environment(RECIPE="configs/accelerate/zero2.yaml", PYTHON="false", NUM_NODES="1:2")
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 2
    assert "error: RECIPE=configs/accelerate/zero2.yaml needs a fixed number of nodes" in ended.stderr


def workers(config):
    """Return the process id of each rank that trains by a config."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if config.encode() in (folder / "cmdline").read_bytes():
                variables = dict(each.partition(b"=")[::2] for each in (folder / "environ").read_bytes().split(b"\0"))
                if b"RANK" in variables:
                    found[int(variables[b"RANK"])] = int(folder.name)
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.slow  # twenty seconds on two free cores
def test_torchrun_starts_both_processes_again_when_one_is_killed_and_nothing_is_lost(project, tmp_path, start):
    lengths = LENGTHS | {"batch_size": 2}
    config = written(project.distill(tmp_path / "run", **lengths), tmp_path / "recipe.yaml")
    command = ["bash", str(CLUSTER / "node.sh"), str(ROOT / "train" / "distill.py"), "--config", config]
    said = tmp_path / "said"
    with said.open("wb") as file:
        run = subprocess.Popen(
            command, env=environment(NUM_NODES="1:1", PROCESSES_PER_NODE="2", MAX_RESTARTS="1"), stdout=file, stderr=file
        )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "checkpoints" / "step-00000020").exists():
            assert run.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.02)
        victim = workers(config)[1]
        os.kill(victim, signal.SIGKILL)
        assert run.wait(150) == DONE, said.read_text()
    finally:
        run.terminate()
        run.wait(60)
    assert victim not in workers(config).values()
    assert "resumed from" in said.read_text()
    pair = start_pair(start, run_distillation, project.distill(tmp_path / "whole", **lengths))
    assert [each.end() for each in pair] == [DONE, DONE], [each.said for each in pair]
    weights, expected = (
        load_file(tmp_path / name / "checkpoints" / "step-00000100" / "model.safetensors") for name in ("run", "whole")
    )
    assert weights.keys() == expected.keys()
    assert all(weights[name].equal(expected[name]) for name in expected)


@pytest.fixture
def start_node(tmp_path):
    """A function that starts a node of a run of one or two nodes; all are killed at the end."""
    nodes = []

    def start_node(config, **more):
        """Return its process and the file of what it says; the first one hosts the store by which nodes find each other."""
        meeting = f"{PATIENCE},is_host={int(not nodes)}"
        said = tmp_path / f"node-{len(nodes)}"
        command = ["bash", str(CLUSTER / "node.sh"), str(ROOT / "train" / "distill.py"), "--config", config]
        sizes = {"NUM_NODES": "1:2", "MAX_RESTARTS": "2", "PET_RDZV_CONF": meeting}
        with said.open("wb") as file:
            node = psutil.Popen(command, env=environment(**sizes | more), stdout=file, stderr=file)
        nodes.append(node)
        return node, said

    yield start_node
    for node in nodes:
        lose(node)


def lose(node):
    """Kill a node's launcher and its processes, as where a machine goes."""
    for each in [node, *node.children(recursive=True)] if node.is_running() else []:
        each.kill()
    node.wait(10)


def wait_for(condition, nodes, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert all(node.poll() is None for node, _ in nodes), [said.read_text()[-3000:] for _, said in nodes]
        assert time.monotonic() < deadline, [said.read_text()[-3000:] for _, said in nodes]
        time.sleep(0.02)


@pytest.mark.slow  # a minute
@pytest.mark.parametrize("engine", [{}, FSDP2], ids=["DDP", "FSDP2"])
def test_a_run_that_loses_a_node_takes_the_same_steps_with_the_other_one(project, tmp_path, start, start_node, engine):
    schedule = LENGTHS | {"max_steps": 60, "batch_size": 2, "micro_batches_per_step": 2, "trackers": ["tensorboard"]}
    config = written(project.distill(tmp_path / "run", **schedule), tmp_path / "recipe.yaml")
    place = engine | {"MAIN_PORT": str(free_port())}
    nodes = [start_node(config, **place) for _ in range(2)]
    wait_for((tmp_path / "run" / "checkpoints" / "step-00000020").exists, nodes)
    (left, said), (lost, _) = nodes
    assert len(workers(config)) == 2
    lose(lost)
    assert left.wait(150) == DONE, said.read_text()[-5000:]
    assert "resumed from" in said.read_text()
    whole = start(run_distillation, project.distill(tmp_path / "whole", **schedule))
    assert whole.end() == DONE, whole.said
    for name in ("loss", "gradient_norm"):
        found, expected = (read_metric(tmp_path / output, name) for output in ("run", "whole"))
        assert len(set(expected)) > 50
        assert largest_difference(found, expected) < TOLERANCE, name
    files = (tmp_path / output / "artifact" / "model.safetensors" for output in ("run", "whole"))
    torch.testing.assert_close(*map(load_file, files), rtol=0, atol=TOLERANCE)
