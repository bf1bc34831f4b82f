"""One name for all commands: it runs their modules, ends with their exit codes, and completes keys."""

import sys

from scripts.cli import COMMANDS, main


def run(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["draftsmith", *argv])
    for module, _ in COMMANDS.values():  # other tests may have imported them
        monkeypatch.delitem(sys.modules, module, raising=False)
    return main()


def test_a_command_ends_with_the_exit_code_of_its_module(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "gate", str(tmp_path / "none.json")) == 2
    assert "none.json" in capsys.readouterr().err
    assert run(monkeypatch, "eval", "--print-config") == 0
    assert "suite:" in capsys.readouterr().out


def test_every_command_is_listed_with_a_sentence(monkeypatch, capsys):
    assert run(monkeypatch, "--help") == 0
    listed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert [name for name, sentence in listed if sentence] == list(COMMANDS)


def test_an_unknown_command_is_refused(monkeypatch, capsys):
    assert run(monkeypatch, "trane") == 2
    assert "no command 'trane'; there are run, plan" in capsys.readouterr().err
