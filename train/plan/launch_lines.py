"""The lines that start a run by a way that was planned: on one node, or as a SLURM job over several."""

from __future__ import annotations

import math

from configs.schema.commands.planning import HardwareConfig
from train.plan.memory import Sharing

NODE = "scripts/cluster/node.sh"
STATES, PORT = "runs/states", 8000  # of servers on the node itself


def launch_lines(engine: Sharing, hardware: HardwareConfig, entry: str, options: str) -> list[str]:
    """Return the lines.

    Args:
        entry: `train/heads.py` or `train/distill.py`.
        options: of the run, as they stand on a command line.
    """
    n, per_node = hardware.num_accelerators, hardware.accelerators_per_node
    command = f"{entry} {options}"
    if engine.spreads_target:
        command += " --set target.device_map=auto"
    elif engine.group > 1:
        command += f" --set target.parallel.{engine.kind}={engine.group}"
    if n > per_node:
        nodes = math.ceil(n / per_node)
        file, front = "slurm.sbatch", ""
        if engine.servers:
            file, front = "slurm_states.sbatch", f"SERVER_NODES={engine.servers} "
        elif engine.spreads_target:
            front = "PROCESSES_PER_NODE=1 "
        elif engine.stage:
            front = f"RECIPE=configs/accelerate/{engine.recipe}.yaml "
        return [f"{front}sbatch --nodes={nodes} --gpus-per-node={per_node} scripts/cluster/{file} {command}"]
    if engine.servers:
        return _beside_servers(engine, n, entry, options)
    if engine.several is False or engine.spreads_target:  # one process
        name = engine.on_cpu or engine.recipe if hardware.preset == "laptop_cpu" else engine.recipe
        gpus = " --gpu_ids all" if engine.spreads_target else ""
        return [f"accelerate launch --quiet{gpus} --config_file configs/accelerate/{name}.yaml {command}"]
    front = f"RECIPE=configs/accelerate/{engine.recipe}.yaml " if engine.stage else ""
    if hardware.preset == "laptop_cpu":
        front += "ACCELERATE_USE_CPU=true "
    return [f"{front}PROCESSES_PER_NODE={n} {NODE} {command}"]


def _beside_servers(engine: Sharing, n: int, entry: str, options: str) -> list[str]:
    """Return the line that makes the folder of states, one for each server on this node, and training on other accelerators."""
    urls = [f"http://localhost:{PORT + number}/v1" for number in range(engine.servers)]
    lines = [
        f"CUDA_VISIBLE_DEVICES={_numbered(number * engine.server_size, engine.server_size)} "
        f'eval "$(python scripts/serve_states.py {options} {_states([url])}) --tensor-parallel-size {engine.server_size}" &'
        for number, url in enumerate(urls)
    ]
    trainers = engine.trainers(n)
    own = _numbered(n - trainers, trainers)
    return [
        f"mkdir -p {STATES}",
        *lines,
        f"CUDA_VISIBLE_DEVICES={own} PROCESSES_PER_NODE={trainers} {NODE} {entry} {options} {_states(urls)}",
    ]


def _states(urls: list[str]) -> str:
    return f"--set 'target.states.urls=[{','.join(urls)}]' target.states.path={STATES}"


def _numbered(first: int, count: int) -> str:
    return ",".join(map(str, range(first, first + count)))
