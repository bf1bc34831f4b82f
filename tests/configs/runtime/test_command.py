"""Every command's outside: arguments in, exit code out, one line on stderr for a user's mistake; keys and configs printed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
from safetensors import SafetensorError

from configs.runtime.command import (
    BAD_INPUT,
    DONE,
    EXIT_CODE_FILE,
    FAILED,
    GATE_FAILED,
    INTERRUPTED,
    TERMINATED,
    run_command,
)
from configs.runtime.errors import InputError, RunFailed, Stopped
from configs.runtime.files import CHECKOUT
from configs.runtime.loading import keys_of, load_config
from configs.schema.data import DataConfig
from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import EvalConfig, GateConfig
from configs.schema.training import DistillConfig, HeadsConfig


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


def test_the_exit_code_is_noted_for_whoever_started_the_launcher(monkeypatch, tmp_path):
    for place in (tmp_path / "note", tmp_path):  # a folder takes none
        monkeypatch.setenv(EXIT_CODE_FILE, str(place))
        assert run(raising(Stopped("after step 3"))) == TERMINATED
    assert (tmp_path / "note").read_text() == "143"


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


# --- keys with type, default and meaning; a config as YAML --------------------------------------------------------------


def run_of(schema, *argv, **options):
    return run_command(schema, lambda *_: pytest.fail("the command ran"), description="", argv=list(argv), **options)


def test_a_key_has_its_type_default_and_the_comment_beside_it():
    keys = {(key.path, key.kind): key for key in keys_of(HeadsConfig)}
    depths = keys["head.num_depths", "kind: mtp"]
    assert (depths.type, depths.default, depths.sentence) == ("integer", "4", "depths trained")
    assert keys["head.reads", "kind: mtp"].type == "post_norm | pre_norm"
    assert keys["target.revision", ""].type == "string | null"


@pytest.mark.parametrize("schema", [DataConfig, DistillConfig, HeadsConfig, EvalConfig, GateConfig])
def test_every_key_has_a_sentence(schema):
    assert [key.path for key in keys_of(schema) if not key.sentence] == []


def test_keys_are_printed_before_missing_arguments_are_complained_of(capsys):
    assert run_of(GateConfig, "--keys", "rules.*.m", add_arguments=lambda parser: parser.add_argument("report")) == DONE
    printed = capsys.readouterr().out
    assert "rules.*.min: number | null = null\n" in printed
    assert "suite_sha256" not in printed


def test_a_printed_config_loads_as_the_same(capsys, tmp_path):
    assert run_of(EvalConfig, "--print-config", "--set", "decode.seed=3", "decode.temperature=0.5") == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    config = load_config(EvalConfig, tmp_path / "printed.yaml")
    assert config == load_config(EvalConfig, None, ["decode.seed=3", "decode.temperature=0.5"])
    assert (config.decode.seed, config.decode.temperature) == (3, 0.5)
