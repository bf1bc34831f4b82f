"""The head families by name: how each is built on a target, and how it drafts. A new family is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from pydantic import BaseModel
from torch import nn
from transformers import PreTrainedModel

from configs.schema.heads import (
    DFlashSettings,
    DSparkSettings,
    Eagle3Settings,
    HydraSettings,
    MedusaSettings,
    MtpSettings,
    PEagleSettings,
)
from heads.families import dflash, dspark, eagle3, hydra, medusa, mtp, peagle
from heads.modules.interface import HeadModule
from heads.proposers.protocol import Proposer
from heads.proposers.vocabulary import DraftVocabulary


def _as_built(head: nn.Module, target: PreTrainedModel) -> None:
    """Leave a new head's weights as they are."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One way of building heads.

    Args:
        settings: its class in `configs.schema.heads`.
        build: makes the module on a target, new weights and all: settings, target, draft vocabulary (None: all tokens).
        propose: makes the decoding side of a module that `serve` returned, on a device.
        in_one_forward: all drafts of a round come out of one forward, so that a further one costs no time of the draft's.
        start: gives a module that is about to be trained, and not one that is loaded, further first weights: module, target.
    """

    settings: type[BaseModel]
    build: Callable[[Any, PreTrainedModel, DraftVocabulary | None], nn.Module]
    propose: Callable[[Any, torch.device], Proposer]
    in_one_forward: bool = False
    start: Callable[[Any, PreTrainedModel], None] = _as_built

    def taps(self, head: nn.Module) -> Sequence[int]:
        """Return which of the target's states a module reads besides the final one."""
        return cast(HeadModule, head).taps


FAMILIES: dict[str, Family] = {
    "medusa": Family(settings=MedusaSettings, build=medusa.Medusa, propose=medusa.make_proposer, in_one_forward=True),
    "hydra": Family(settings=HydraSettings, build=hydra.Hydra, propose=hydra.make_proposer),
    "eagle3": Family(settings=Eagle3Settings, build=eagle3.Eagle3, propose=eagle3.make_proposer),
    "peagle": Family(settings=PEagleSettings, build=peagle.PEagle, propose=peagle.make_proposer, in_one_forward=True),
    "dflash": Family(settings=DFlashSettings, build=dflash.DFlash, propose=dflash.make_proposer, in_one_forward=True),
    "dspark": Family(settings=DSparkSettings, build=dspark.DSpark, propose=dspark.make_proposer, in_one_forward=True),
    "mtp": Family(settings=MtpSettings, build=mtp.Mtp, propose=mtp.make_proposer, start=mtp.start_from_checkpoint),
}


def serve(head: nn.Module, target: PreTrainedModel) -> nn.Module:
    """Put a head, in place, where the target is and into its dtype, frozen."""
    return head.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
