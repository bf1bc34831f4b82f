"""The command that plans: which kind of recipe it takes, what it prints, what it refuses."""

import re
from pathlib import Path

import pytest

from configs.runtime.command import BAD_INPUT, DONE, run_command
from configs.schema.commands.planning import HardwareConfig, PlanDistillConfig, PlanHeadsConfig
from scripts.plan import main, schema_of
from train.plan.memory import SPREADING, Sharing
from train.plan.page import launch_line

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
        (["--config", "configs/distill/draft_lm.yaml", "--set", "output=a", "head.kind=medusa"], PlanHeadsConfig),
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


@pytest.mark.parametrize(
    ("sharing", "preset", "num_accelerators", "line"),
    [
        (
            Sharing(recipe="zero2", stage=2),
            "h100_80gb",
            16,
            "RECIPE=configs/accelerate/zero2.yaml sbatch --nodes=2 --gpus-per-node=8 scripts/cluster/slurm.sbatch COMMAND",
        ),
        (
            SPREADING,
            "h100_80gb",
            8,
            "accelerate launch --quiet --config_file configs/accelerate/one_gpu.yaml COMMAND --set target.device_map=auto",
        ),
        (
            Sharing(recipe="one_gpu", on_cpu="one_process_cpu", min_processes=1, max_processes=1),
            "laptop_cpu",
            1,
            "accelerate launch --quiet --config_file configs/accelerate/one_process_cpu.yaml COMMAND",
        ),
    ],
)
def test_a_way_that_fits_comes_with_the_line_that_starts_it(sharing, preset, num_accelerators, line):
    assert launch_line(sharing, HardwareConfig(preset=preset, num_accelerators=num_accelerators), "COMMAND") == line
