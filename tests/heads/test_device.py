"""What a device is asked before work is given to it."""

import torch

from heads.device import has_compiler, timed_event


def test_a_gpu_on_which_nothing_compiles_has_no_compiler(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(torch, "compile", fail)
    assert not has_compiler.__wrapped__(torch.device("cuda"))


def test_an_event_is_queued_on_its_own_device_whatever_the_current_one_is(monkeypatch):
    """Stands in for two accelerators: without a stream torch records an event on the current one's."""
    queued = []
    event = type("Event", (), {"record": lambda self, stream="the current device's": queued.append(stream)})
    monkeypatch.setattr(torch, "Event", lambda device, enable_timing: event())
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"that of {device}")
    timed_event(torch.device("cuda:1"))
    assert queued == ["that of cuda:1"]
