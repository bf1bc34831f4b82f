"""What a device is asked before work is given to it."""

import torch

from heads.device import has_compiler


def test_a_gpu_on_which_nothing_compiles_has_no_compiler(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(torch, "compile", fail)
    assert not has_compiler.__wrapped__(torch.device("cuda"))
