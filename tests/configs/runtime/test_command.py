"""Every command's outside: arguments in, exit code out, one line on stderr for a user's mistake."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
from safetensors import SafetensorError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from configs.runtime.command import (
    BAD_INPUT,
    DONE,
    ERROR_FILE,
    FAILED,
    GATE_FAILED,
    INTERRUPTED,
    STOPPED_FILE,
    TERMINATED,
    run_command,
)
from configs.runtime.errors import InputError, RunFailed, Stopped
from configs.runtime.files import CHECKOUT
from configs.schema.decoding import DecodeConfig


def run(main, *argv, **options):
    return run_command(DecodeConfig, main, description="Decode.", argv=list(argv), **options)


def raising(error):
    def main(config):
        raise error

    return main


def test_a_commands_own_arguments_reach_main_beside_the_config():
    seen = []

    def main(config, arguments):
        seen.append((config.seed, arguments.report))
        return GATE_FAILED

    code = run(main, "report.json", "--set", "seed=4", add_arguments=lambda parser: parser.add_argument("report"))
    assert (code, seen) == (GATE_FAILED, [(4, "report.json")])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--set", "sed=1"], "the nearest known key is 'seed'"),
        (["--config", "missing.yaml"], "config file not found: missing.yaml"),
        (["--conf", "x.yaml"], "unrecognized arguments: --conf"),
    ],
)
def test_a_wrong_argument_is_reported_before_main_is_called(argv, said, capsys):
    assert run(raising(AssertionError("main was called")), *argv) == BAD_INPUT
    stderr = capsys.readouterr().err
    assert said in stderr
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1


def test_of_several_processes_only_the_first_speaks(monkeypatch, capsys):
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", "0")
        assert run(raising(InputError("no such target"))) == BAD_INPUT
        assert capsys.readouterr().err.count("\n") == lines


def test_an_interrupt_is_a_short_line_and_the_shells_code(capsys):
    assert run(raising(KeyboardInterrupt())) == INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


def test_a_stop_in_good_order_is_noted_for_whoever_started_the_launcher_and_a_failure_is_not(capsys, monkeypatch, tmp_path):
    note = tmp_path / "note"
    monkeypatch.setenv(STOPPED_FILE, str(note))
    assert run(raising(InputError("disk full"))) == BAD_INPUT
    assert not note.exists()
    assert run(raising(Stopped("after step 3"))) == TERMINATED
    assert note.read_text() == "after step 3\n"
    monkeypatch.setenv(STOPPED_FILE, str(tmp_path))  # a folder
    assert run(raising(Stopped("after step 4"))) == TERMINATED
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (InputError("prompts.jsonl, line 3: not JSON"), "error: prompts.jsonl, line 3: not JSON"),
        (RunFailed("the loss is nan in step 8"), "error: the loss is nan in step 8"),
        (ValueError("shape\nof what"), "ValueError: shape"),
    ],
)
def test_torchs_launcher_shows_why_a_process_failed(error, message, tmp_path, monkeypatch):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    code = run(raising(error))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file=str(tmp_path / "error.json"))
    assert f"traceback : {message}\n" in ChildFailedError("train", {0: failure}).format_msg()
    monkeypatch.setenv(ERROR_FILE, str(tmp_path))  # a folder
    assert run(raising(error)) == code


@pytest.mark.parametrize("bug", [MemoryError(), OSError(5, "Input/output error")])
def test_what_is_not_the_users_mistake_keeps_its_traceback_and_is_no_failed_gate(bug, capsys):
    assert run(raising(bug)) == FAILED == 70
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last):")
    assert str(bug) in shown


def test_a_run_that_cannot_go_on_says_so_from_every_process(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert run(raising(RunFailed("the loss is nan in step 8"))) == FAILED
    assert capsys.readouterr().err == "error: the loss is nan in step 8\n"


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/report.json"), "/data/report.json"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "a file"),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), "a file"),
    ],
)
def test_a_full_disk_is_one_line(error, place, capsys):
    assert run(raising(error)) == BAD_INPUT
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: cannot write {place}: ")
    assert shown.count("\n") == 1


def test_a_reader_that_has_seen_enough_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, CHECKOUT / "eval/gate.py", "report.json", "--keys"]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=plain, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (DONE, "")
