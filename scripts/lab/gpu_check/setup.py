"""What the parts of the check share: the target on both devices, prompts, and the head that is trained on the way."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from configs.schema.evaluation import SuiteConfig
from configs.schema.target import TargetConfig
from eval.decoder.decode import Request
from eval.measure.suite import Turns, load_suite
from heads.device import default_device, release_memory
from heads.frozen.loading import Target, load_target
from scripts.lab.settings import GpuCheckConfig


class Setup:
    """The check under way; `device` is this process's accelerator, the CPU where there is none."""

    def __init__(self, config: GpuCheckConfig) -> None:
        self.config, self.device = config, default_device()
        self.artifact = Path(config.output) / "head" / "artifact"  # once `speed.train_head` has run

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def device_name(self) -> str:
        return str(self.device)

    @property
    def dtype(self) -> str:
        """What the target is decoded in where nothing is compared with the CPU."""
        return self.config.dtype

    @cached_property
    def target(self) -> Target:
        return self.load(self.dtype, self.device_name)

    @cached_property
    def wide(self) -> Target:
        return self.load("float32", self.device_name)

    @cached_property
    def wide_on_cpu(self) -> Target:
        return self.wide if self.is_cpu else self.load("float32", "cpu")

    @cached_property
    def requests(self) -> list[Request]:
        suite = load_suite(SuiteConfig(path=self.config.suite, num_prompts=self.config.num_prompts))
        return Turns(self.wide_on_cpu, suite.prompts).first

    def load(self, dtype: str, device: str, forward: str = "transformers") -> Target:
        settings = {"name": self.config.target, "dtype": dtype, "device": device, "forward": forward}
        return load_target(TargetConfig.model_validate(settings))

    def free(self) -> None:
        """Give back what the parts before have held."""
        for name in ("target", "wide", "wide_on_cpu"):
            self.__dict__.pop(name, None)
        release_memory(self.device)
