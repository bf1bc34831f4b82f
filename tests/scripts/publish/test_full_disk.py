"""A disk that fills up while files are written: one sentence, and nothing under the final name."""

import errno
import importlib
import os

import pytest

from configs.runtime.command import BAD_INPUT, run_command
from configs.schema.commands.release import ExportConfig

exporting = importlib.import_module("scripts.export")


@pytest.fixture
def full_disk(monkeypatch):
    """Files no longer reach the disk."""

    def refuse(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)


def test_a_dry_run_leaves_nothing(dry, full_disk, tmp_path):
    code, _, err = dry()
    assert (code, err.count("\n")) == (BAD_INPUT, 1)
    assert f"cannot write {tmp_path / 'dry'}: [Errno 28] No space left on device" in err
    assert [path.name for path in tmp_path.iterdir() if "dry" in path.name] == []


def test_an_export_leaves_nothing(release, full_disk, tmp_path, capsys):
    out = tmp_path / "exported"
    argv = [str(release / "artifact"), "--to", "transformers", "--out", str(out), "--target", str(release / "target")]
    code = run_command(ExportConfig, exporting.main, description="", argv=argv, add_arguments=exporting.add_arguments)
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (BAD_INPUT, 1)
    assert f"cannot write {out}" in err
    assert [path.name for path in tmp_path.iterdir() if "exported" in path.name] == []
