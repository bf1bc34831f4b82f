"""Heads written as artifacts, for what reads artifacts."""

from heads.artifact import save_head
from heads.frozen.identity import TargetIdentity
from heads.metadata import head_metadata


def save_artifact(folder, head, identity, vocabulary=None, *, vocab_size=64, num_speculative_tokens=3, provenance=None):
    """Write a head as an artifact; return its metadata. `identity` is the target's, as a dict; `vocabulary`: a reduced one."""
    known = {"num_speculative_tokens": num_speculative_tokens, "training": {}, "provenance": provenance or {}}
    metadata = head_metadata(head.settings, head.taps, TargetIdentity(**identity), vocabulary, vocab_size, **known)
    save_head(folder, head, metadata, vocabulary)
    return metadata
