"""What `accelerate launch` makes of the DeepSpeed recipes on the first of two machines, by its own functions."""

import socket
from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env

RECIPES = sorted((Path(__file__).resolve().parents[2] / "configs" / "accelerate").glob("zero*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_each_node_starts_its_own_processes_and_none_hands_its_environment_on(recipe):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = ["--num_machines", "2", "--num_processes", "4", "--machine_rank", "1", "--main_process_ip", "node0"]
    arguments = launch_command_parser().parse_args(
        ["--config_file", str(recipe), *place, "--main_process_port", port, "train/heads.py"]
    )
    arguments, defaults, _ = _validate_launch_command(arguments)
    arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    command, _ = prepare_deepspeed_cmd_env(arguments)
    # Any command is `deepspeed ...`, before which accelerate writes all variables to a file; None: torchrun, in this process.
    assert command is None
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.node_rank) == ("2", "2", 1)
    assert arguments.rdzv_endpoint == f"node0:{port}"
