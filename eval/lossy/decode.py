"""`decode` and `generate` of `eval.decoder.decode`, with the lossy mode that `config.lossy` names, if any.

Without one they decode without loss, and so does plain decoding, whatever `config.lossy` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from configs.schema.decoding import DecodeConfig
from eval.decoder.batch import BatchRun
from eval.decoder.decode import DecodingRun
from eval.decoder.decode import decode as decode_by
from eval.decoder.decode import generate as generate_by
from eval.decoder.request import Request
from eval.decoder.verifier import Verifier
from eval.lossy.neighbourhood import NeighbourhoodVerifier
from eval.lossy.particles import ParticleRun
from eval.lossy.tolerance import TolerantVerifier
from eval.lossy.typical import TypicalVerifier
from heads.frozen.loading import Target
from heads.proposers.protocol import Proposer


def start_run(
    target: Target, requests: Sequence[Request], config: DecodeConfig, proposer: Proposer | None, **settings: Any
) -> DecodingRun:
    """Start a batch by the rule in force; the settings are those of `eval.decoder.batch.BatchRun`.

    Raises:
        InputError: a processor is given, and drafts are weighed by particles.
    """
    if config.rule == "smc" and proposer is not None:
        settings.pop("measure_overlap", None)  # particles compare no distributions
        return ParticleRun(target, requests, config, proposer, **settings)
    make_verifier = verifier_for(config) if proposer is not None else Verifier
    return BatchRun(target, requests, config, proposer, **settings, make_verifier=make_verifier)


def verifier_for(config: DecodeConfig) -> type[Verifier]:
    """Return the verifier of the rule in force."""
    verifiers = {"typical": TypicalVerifier, "neighbourhood": NeighbourhoodVerifier, "tolerance": TolerantVerifier}
    return verifiers.get(config.rule, Verifier)


decode = partial(decode_by, make_run=start_run)
generate = partial(generate_by, make_run=start_run)
