"""The doctor finds out what a machine has, says what is missing for what, and fails where nothing can be trained."""

import sys

import pytest
import torch

import heads.device
from scripts import doctor
from scripts.doctor import LEAST_DISK, LEAST_MEMORY, TOOLS, missing, stops_training


@pytest.fixture
def found():
    """A machine on which nothing is missing."""
    disk = {"folder": "/here", "free_bytes": LEAST_DISK, "writable": True}
    return {
        "machine": {"memory_free_bytes": LEAST_MEMORY, "bfloat16": True, "gpus": []},
        "disks": {"runs": dict(disk), "downloads": dict(disk), "hub": dict(disk)},
        "accelerators": {"error": None, "devices": [{"name": "a GPU", "error": None}]},
        "versions": {"installed": {"torch": "2+cpu", "peft": "1"}, "missing": []},
        "tools": dict.fromkeys(TOOLS, "there"),
        "hub": {"logged_in": True, "offline": False, "cache": "/cache"},
    }


STOPS = [
    ("accelerators/error", "ImportError: libfoo", "torch"),
    ("versions/missing", ["peft"], "peft"),
    ("machine/memory_free_bytes", LEAST_MEMORY - 2**30, "memory"),
    ("disks/runs/writable", False, "/here"),
    ("disks/runs/free_bytes", LEAST_DISK // 2, "/here"),
    ("disks/downloads/free_bytes", 0, "/here"),
]
HINTS = [
    ("machine/bfloat16", False, "bfloat16"),
    ("accelerators/devices", [], "draftsmith plan"),
    ("accelerators/devices/0/error", "no kernel image", "no kernel image"),
    ("hub/logged_in", False, "hf auth login"),
    ("hub/offline", True, "/cache"),
    ("disks/downloads/writable", False, "DRAFTSMITH_CACHE"),
    *((f"tools/{name}", None, name) for name in TOOLS),
]


@pytest.mark.parametrize(
    ("place", "value", "named", "stops"), [(*each, True) for each in STOPS] + [(*each, False) for each in HINTS]
)
def test_each_thing_that_is_missing_is_one_sentence(found, place, value, named, stops):
    assert [*stops_training(found), *missing(found)] == []
    *above, last = (int(step) if step.isdigit() else step for step in place.split("/"))
    inner = found
    for step in above:
        inner = inner[step]
    inner[last] = value
    (said,) = stops_training(found) if stops else missing(found)
    assert named in said
    assert [*(missing(found) if stops else stops_training(found))] == []


def test_a_gpu_that_torch_does_not_see_is_named_with_the_build_for_it(found):
    found["machine"]["gpus"], found["accelerators"]["devices"] = [{"name": "H100"}], []
    assert [each for each in missing(found) if "H100" in each and "ALLOW_CUDA=1" in each]


@pytest.mark.parametrize(
    ("cpuinfo", "bfloat16"), [("flags\t\t: sse2 avx512_bf16", True), ("Features\t: asimd", False), ("", None)]
)
def test_the_processors_instructions_are_read_where_the_system_tells_them(monkeypatch, tmp_path, cpuinfo, bfloat16):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{cpuinfo}\n")
    monkeypatch.setattr(doctor, "CPUINFO", tmp_path / "cpuinfo")
    described = doctor.describe_machine()
    assert described["bfloat16"] == bfloat16
    assert 0 < described["memory_free_bytes"] <= described["memory_bytes"]


def test_a_device_that_does_not_compute_is_found_out(monkeypatch):
    monkeypatch.setattr(heads.device, "default_device", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    accelerators = doctor.describe_accelerators()
    assert accelerators["error"] is None
    assert [(each["name"], "meta" in each["error"]) for each in accelerators["devices"]] == [("meta", True)]


def test_engines_are_found_on_the_path_and_in_their_own_environments(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "CHECKOUT", tmp_path)
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    program = tmp_path / "elsewhere" / "sglang"
    for folder in (program.parent, tmp_path / ".cache/venvs/vllm", tmp_path / "cache/venvs/openvino"):
        folder.mkdir(parents=True)
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    found = [doctor.find_tool(name) for name in ("sglang", "vllm", "openvino", "llama_cpp", "peft")]
    folders = [str(tmp_path / name) for name in (".cache/venvs/vllm", "cache/venvs/openvino")]
    assert found == [str(program), *folders, None, sys.prefix]


def test_a_broken_torch_is_said_without_a_token_and_ends_with_1(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://me:secret@hub.example")
    assert doctor.main([]) == 1
    said = capsys.readouterr().out
    assert "  ! torch does not work (ModuleNotFoundError" in said
    assert "abcdefghij" not in said
    assert "me:secret" not in said
