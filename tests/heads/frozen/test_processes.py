"""Processes that groups do not divide are refused before weights are read."""

from pathlib import Path

import pytest
import torch

from configs.runtime.errors import ConfigError
from configs.schema.target import TargetConfig
from heads.frozen import processes


def test_groups_that_do_not_divide_the_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"target\.shards"):
        processes.split_arguments(Path("none"), TargetConfig(device="cpu", shards=3), torch.device("cpu"))
