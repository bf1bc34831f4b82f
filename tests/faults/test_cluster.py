"""The job files of scripts/cluster: SLURM's with stand-ins for its programs, Kubernetes' by its fields."""

import os
import re
import signal
import string
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from configs.runtime.command import DONE, TERMINATED
from configs.runtime.files import write_json
from scripts.check.vllm_server import free_port
from tests.faults.conftest import start_pair
from train.launch import run_distillation
from train.loop.checkpoints import list_checkpoints, read_manifest

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "scripts" / "cluster"
LENGTHS = {"max_steps": 100, "eval_every_steps": 20, "checkpoint_every_steps": 20}  # long enough to be met in the middle

# Runs a task of the job as Slurm would; the first time, it sends SIGTERM to the task's group once a checkpoint is there.
SRUN = """#!/usr/bin/env bash
while [[ "$1" == -* ]]; do shift; done
export SLURM_NODEID=0
set -m
"$@" &
task=$!
if [[ ! -e requeued ]]; then
    until [[ -e run/checkpoints/step-00000020 ]]; do kill -0 $task || exit 1; sleep 0.02; done
    kill -TERM -- -$task
fi
wait $task
"""
SCONTROL = """#!/usr/bin/env bash
case "$1" in
    show) printf 'localhost\\nnever-asked\\n' ;;
    requeue) echo "$2" >> requeued ;;
esac
"""


def written(config, path):
    write_json(path, config.model_dump(mode="json"))  # JSON is YAML
    return str(path)


def environment(**more):
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "PYTHON": sys.executable}
    return inherited | quiet | {"MAIN_PORT": str(free_port())} | more


def write_tools(folder, **texts):
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def run_slurm_job(folder, tools, *command, **more):
    """Run the job as Slurm does: a copy of the script, in the folder of the submission."""
    script = folder / "spooled"
    script.write_text((CLUSTER / "slurm.sbatch").read_text())
    for name in ("scripts", "train"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    job = {"JOB_ID": "77", "JOB_NODELIST": "localhost", "JOB_NUM_NODES": "1", "SUBMIT_DIR": str(folder)}
    slurm = {f"SLURM_{name}": value for name, value in job.items()}
    variables = environment(PATH=f"{tools}:{os.environ['PATH']}", **slurm) | more
    settings = {"capture_output": True, "text": True, "timeout": 140, "check": False}
    return subprocess.run(["bash", str(script), *command], cwd=folder, env=variables, **settings)


@pytest.mark.slow
def test_a_slurm_job_that_is_stopped_goes_back_into_the_queue_and_on_from_its_checkpoint(project, tmp_path, start):
    tools = tmp_path / "tools"
    tools.mkdir()
    write_tools(tools, srun=SRUN, scontrol=SCONTROL)
    config = written(project.distill(tmp_path / "run", **LENGTHS), tmp_path / "recipe.yaml")
    job = partial(run_slurm_job, tmp_path, tools, str(ROOT / "train" / "distill.py"), "--config", config)
    first = job()
    assert first.returncode == TERMINATED, first.stderr
    assert "a checkpoint is in" in first.stderr
    assert (tmp_path / "requeued").read_text() == "77\n"
    (*_, newest) = list_checkpoints(tmp_path / "run" / "checkpoints")
    assert 20 <= read_manifest(newest).step < 100
    second = job(SLURM_RESTART_COUNT="1")
    assert second.returncode == DONE, second.stderr
    assert f"resumed from {newest}" in second.stderr
    assert (tmp_path / "requeued").read_text() == "77\n"
    whole = start(run_distillation, project.distill(tmp_path / "whole", **LENGTHS))
    assert whole.end() == DONE, whole.said
    last = "checkpoints/step-00000100/model.safetensors"
    assert (tmp_path / "run" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()


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


# Stands for the launcher: does as it is told once SIGTERM has come, after a second one as well.
LAUNCHER = """#!/usr/bin/env bash
trap 'stopped=yes' TERM
touch started
for _ in {1..500}; do [[ -n "${stopped:-}" ]] && break; sleep 0.02; done
sleep 0.3
[[ -z "$SAID" ]] || echo 143 > "$DRAFTSMITH_EXIT_CODE_FILE"
exit "$LAUNCHER_CODE"
"""
# Signals twice, as Slurm does where a job is preempted shortly before its limit.
SIGNALLING = """#!/usr/bin/env bash
while [[ "$1" == -* ]]; do shift; done
export SLURM_NODEID=0
"$@" &
until [[ -e started ]]; do sleep 0.02; done
kill -TERM $!
sleep 0.1
kill -TERM $!
wait $!
"""


@pytest.mark.parametrize(
    ("said", "launcher_code", "code"),
    [("a checkpoint is there", 1, 143), ("", 143, 1), ("", 0, 0)],
    ids=["stopped", "launcher terminated", "done"],
)
def test_only_a_stop_that_training_has_written_a_checkpoint_for_is_requeued(tmp_path, said, launcher_code, code):
    write_tools(tmp_path, srun=SIGNALLING, scontrol=SCONTROL, python=LAUNCHER.replace("started", str(tmp_path / "started")))
    (tmp_path / "scratch").mkdir()
    told = {"PYTHON": str(tmp_path / "python"), "SAID": said, "LAUNCHER_CODE": str(launcher_code)}
    ended = run_slurm_job(tmp_path, tmp_path, "train/heads.py", TMPDIR=str(tmp_path / "scratch"), **told)
    assert ended.returncode == code, ended.stderr
    assert (tmp_path / "requeued").exists() == (code == TERMINATED)
    assert ("no checkpoint was written" in ended.stderr) == (code in (1, 137))
    assert list((tmp_path / "scratch").iterdir()) == []


def test_training_does_not_outlive_the_terminal_that_a_node_was_started_from(tmp_path):
    write_tools(tmp_path, python=LAUNCHER.replace("started", str(tmp_path / "started")))
    told = {"PYTHON": str(tmp_path / "python"), "SAID": "a checkpoint is there", "LAUNCHER_CODE": "1", "TMPDIR": str(tmp_path)}
    command = ["env", "--default-signal=HUP", "bash", str(CLUSTER / "node.sh"), "train/heads.py"]
    node = subprocess.Popen(command, env=environment(**told))
    while not (tmp_path / "started").exists():
        assert node.poll() is None
        time.sleep(0.02)
    node.send_signal(signal.SIGHUP)
    assert node.wait(30) == TERMINATED


# --- the files ----------------------------------------------------------------------------------------------------------


def test_a_kubernetes_job_finds_its_pods_and_disk_and_leaves_time_for_a_checkpoint():
    text = (CLUSTER / "kubernetes_job.yaml").read_text()
    given = dict(re.findall(r'(\b[A-Z]+)=("[^"]*"|\S+)', text.partition("\n#\n")[0]))  # by the launch line in its head
    assert set(given) == set(re.findall(r"\$\{([A-Z]+)\}", text))
    filled = string.Template(text).substitute({name: value.strip('"') for name, value in given.items()})
    objects = {each["kind"]: each for each in yaml.safe_load_all(filled)}
    pod = objects["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    job, name = objects["Job"]["spec"], objects["Job"]["metadata"]["name"]
    service, claim = objects["Service"], objects["PersistentVolumeClaim"]
    assert job["completions"] == job["parallelism"] == int(values["NUM_NODES"]) == 2
    assert service["spec"]["selector"] == {"job-name": name}  # a label that the job gives its pods
    assert pod["subdomain"] == service["metadata"]["name"]
    assert values["MAIN_HOST"] == f"{name}-0.{service['metadata']['name']}"  # how pods of an indexed job are called
    assert values["MAIN_PORT"] == str(service["spec"]["ports"][0]["port"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(values["PROCESSES_PER_NODE"])
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert {each["name"] for each in container["volumeMounts"]} == set(volumes)
    node = (CLUSTER / "node.sh").read_text()
    (grace,) = re.findall(r"GRACE_SECONDS:-(\d+)", node)
    assert pod["terminationGracePeriodSeconds"] > int(grace) > 30
    assert values.keys() <= set(re.findall(r"^([A-Z_]+)=", node, re.MULTILINE))
    command = container["command"][-1].split()
    assert all((ROOT / path).is_file() for path in (command[1], command[2], command[command.index("--config") + 1]))
    # A training that fails by itself ends the job; one that was stopped, or whose node went, goes on. The first rule that fits.
    ended = {"containerName": container["name"], "operator": "NotIn", "values": [137, TERMINATED]}
    disruption = [{"type": "DisruptionTarget", "status": "True"}]
    rules = [{"action": "Ignore", "onPodConditions": disruption}, {"action": "FailJob", "onExitCodes": ended}]
    assert job["podFailurePolicy"]["rules"] == rules
