"""The hashes of the artifact that is to be released, for the gate to hold against the report's.

Apart from `eval.release.checks` because reading an artifact imports torch, which a gate without `--artifact` need not wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.release.checks import Artifact
from eval.report.differences import IDENTITY
from heads.frozen.identity import TargetIdentity
from heads.hub import locate_artifact
from heads.metadata import agreed, hash_artifact, hash_together, read_metadata


def read_shipped(folders: Sequence[Path]) -> Artifact:
    """Return the hash of an artifact, or of several together, and those of the target that it was made for.

    Each is a folder or a name on the Hub (`heads.hub`). Where several were made for different targets, what they differ in
    equals no target's.

    Raises:
        InputError: one is no artifact, or a file of it is missing.
    """
    hashes, made_for = [], []
    for folder in map(locate_artifact, folders):
        metadata = read_metadata(folder)
        hashes.append(hash_artifact(folder, metadata))
        made_for.append(TargetIdentity.from_dict(metadata.target, str(folder)).to_dict())
    return Artifact(sha256=hash_together(hashes), target={key: agreed(each[key] for each in made_for) for key in IDENTITY})
