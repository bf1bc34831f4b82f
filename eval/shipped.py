"""The hashes of the artifact that is to be released, for the gate to hold against the report's.

Apart from `eval.gating` because reading an artifact imports torch, which a gate without `--artifact` need not wait for.
"""

from __future__ import annotations

from pathlib import Path

from eval.comparability import IDENTITY
from eval.gating import Artifact
from heads.artifact import hash_artifact, read_metadata
from heads.identity import TargetIdentity


def read_shipped(folder: Path) -> Artifact:
    """Return an artifact folder's own hash and those of the target that it was made for.

    Raises:
        InputError: it is no artifact, or a file of it is missing.
    """
    metadata = read_metadata(folder)
    made_for = TargetIdentity.from_dict(metadata.target, str(folder)).to_dict()
    return Artifact(sha256=hash_artifact(folder, metadata), target={key: made_for[key] for key in IDENTITY})
