"""Decoding that gives up the target's law for speed: the settings of the modes in `eval.typical` and `eval.particles`.

Imports no torch. A report made with one says so, and `EvalConfig` wants the task's quality measured beside the speed. Left out:
modes that mix the two laws, and the power to which SMC-SD may raise the target's law.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.settings import PositiveFloat, PositiveInt, Settings, Share


class TypicalAcceptance(Settings):
    """Keep the drafts that the target finds plausible (Medusa; Cai et al., 2401.10774): p > min(epsilon, delta exp(-H(p)))."""

    kind: Literal["typical"]
    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.09  # a token above it is plausible after any text
    delta: PositiveFloat = 0.3  # share of exp(-entropy in nats) that will do where the target is undecided
    drafts: Literal["likeliest", "drawn"] = (
        "likeliest"  # which tokens of the draft's are offered; the paper's are the likeliest
    )


class ParticleSampling(Settings):
    """Continue several copies of a text, weighed by the target in place of verification (SMC-SD, 2604.15672)."""

    kind: Literal["smc"]
    num_particles: PositiveInt = 8  # copies of each prompt, which the target reads side by side
    resample_below: Share = 0.5  # of num_particles: fewer effective ones and the light give way to the heavy; 0: never


LossyConfig = Annotated[TypicalAcceptance | ParticleSampling | None, Field(discriminator="kind")]
