"""Processes that groups do not divide are refused before weights are read; DeepSpeed compiles nothing meanwhile."""

from importlib.util import find_spec
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


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("fails", [False, True])
def test_deepspeeds_list_of_operators_is_another_while_processes_join_only(fails, monkeypatch):
    import deepspeed.ops

    def join(**settings):
        assert not deepspeed.ops.__compatible_ops__["any"]
        raise RuntimeError("no transport") if fails else ImportError("deepspeed")

    own = {"any": True}
    monkeypatch.setattr(deepspeed.ops, "__compatible_ops__", own, raising=False)
    monkeypatch.setattr(processes, "PartialState", join)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises((RuntimeError, processes.InputError)):
        processes.join_processes(TargetConfig(device="cpu"))
    assert deepspeed.ops.__compatible_ops__ is own
