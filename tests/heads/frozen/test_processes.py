"""DeepSpeed is kept from compiling operators while processes are joined, and no longer."""

from importlib.util import find_spec

import pytest

from configs.schema.target import TargetConfig
from heads.frozen import processes

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


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
