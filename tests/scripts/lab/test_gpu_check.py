"""`make gpu-check` on the CPU: its lines, what it writes, and that it sees a device that computes something else."""

import json
import os
from functools import cached_property

import pytest
import torch
from accelerate.state import AcceleratorState

from configs.runtime.command import DONE, GATE_FAILED
from configs.runtime.errors import InputError
from configs.runtime.run_record import describe_hardware
from configs.schema.commands.planning import HardwareConfig
from scripts.lab.gpu_check import check, speed
from scripts.lab.gpu_check.page import page_of
from scripts.lab.gpu_check.setup import Setup
from scripts.lab.settings import GpuCheckConfig
from train.plan.plan import with_measured


@pytest.fixture
def config(tiny_run, tiny_llama, tiny_tokenizer, tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)  # whatever precision the last test trained in
    tiny_llama(seed=1, dtype=torch.float32, layers=8).save_pretrained(tmp_path / "target")
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    return GpuCheckConfig.model_validate(
        {
            "target": str(tmp_path / "target"),
            "suite": str(tiny_run / "suite.jsonl"),
            "num_prompts": 6,
            "max_new_tokens": 12,
            "training_steps": 30,
            "timed_steps": 2,
            "batch_size": 2,
            "row_tokens": 32,
            "output": str(tmp_path / "check"),
        }
    )


def rows_of(config):
    with open(f"{config.output}/gpu-check.json", encoding="utf-8") as file:
        return json.load(file)


def test_a_machine_passes_its_own_check_and_a_plan_reads_its_rates(config, monkeypatch):
    monkeypatch.setattr(speed, "LEAST_SPEED", 0)  # a matter of what else the machine does
    assert check.check_gpu(config) == DONE
    written = rows_of(config)
    parts = {row["part"]: row["verdict"] for row in written["rows"]}
    assert parts.keys() == {"machine", "losses", "tokens", "launches", "training", "artifact", "decoding", "processes"}
    assert {row["verdict"] for row in written["rows"]} <= {"ok", "measured", "not here"}
    with open(f"{config.output}/gpu-check.md", encoding="utf-8") as page:
        assert page.read().startswith(f"# GPU check: none of {len(written['rows'])} lines fails\n")
    found = with_measured(HardwareConfig(measured=f"{config.output}/gpu-check.json", tflops=2.0))
    assert found.machine.tflops == 2.0
    assert found.machine.memory_gb_per_second == written["measured"]["memory_gb_per_second"] > 0
    assert 0 < found.utilisation == written["measured"]["utilisation"] < 1


class OtherDevice(Setup):
    """A device whose first block computes something else."""

    @cached_property
    def wide(self):
        target = self.load("float32", "cpu")
        with torch.no_grad():
            target.model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
        return target

    @cached_property
    def wide_on_cpu(self):
        return self.load("float32", "cpu")


def test_a_device_that_computes_something_else_fails_and_a_part_that_breaks_leaves_the_others_their_lines(config, monkeypatch):
    def breaks(setup):
        raise RuntimeError("an illegal memory access was encountered")
        yield

    monkeypatch.setattr(check, "Setup", OtherDevice)
    for name in ("train_head", "compare_artifact", "time_training", "time_decoding"):
        monkeypatch.setattr(check, name, lambda *args: iter(()))
    monkeypatch.setattr(check, "count_kernels", breaks)
    assert check.check_gpu(config) == GATE_FAILED
    failed = [row for row in rows_of(config)["rows"] if row["verdict"] == "fails"]
    assert {row["what"] for row in failed if row["part"] == "tokens"} >= {"greedy, plain, float32", "drawn, plain, float32"}
    assert failed[-1]["found"] == "RuntimeError: an illegal memory access was encountered"
    assert rows_of(config)["rows"][-1]["part"] == "processes"


def test_a_file_that_is_no_measurement_is_refused(tmp_path):
    file = tmp_path / "gpu-check.json"
    file.write_text('{"measured": {"tflops": -1}}')
    with pytest.raises(InputError, match=r"hardware\.measured"):
        with_measured(HardwareConfig(measured=str(file)))


def test_the_page_names_the_gpus_of_nvidia_smi(tmp_path, monkeypatch):
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559, 570.86'\necho 'NVIDIA A100-SXM4-80GB, [N/A], 570.86'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    origin = {"hardware": describe_hardware(), "versions": {"torch": "2.13.0"}, "git": {"commit": "abc"}}
    assert "NVIDIA H100 80GB HBM3, NVIDIA A100-SXM4-80GB, device cuda" in page_of([], origin, "cuda")
