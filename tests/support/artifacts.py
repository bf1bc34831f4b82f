"""Heads written as artifacts, for what reads artifacts."""

from heads.artifact import save_head
from heads.metadata import HiddenStates, Metadata


def save_artifact(folder, head, identity, vocabulary=None, *, vocab_size=64, num_speculative_tokens=3, provenance=None):
    """Write a head as an artifact; return its metadata.

    Args:
        folder: made.
        head: with its settings and taps.
        identity: of the target, as a dict.
        vocabulary: a reduced one; None: all `vocab_size` tokens of the target.
        num_speculative_tokens, provenance: for the metadata.
    """
    metadata = Metadata(
        kind=head.settings.kind,
        target=identity,
        hidden_states=HiddenStates(
            taps=list(head.taps), concat_order=[f"h_{tap}" for tap in head.taps], last_is_post_norm=True
        ),
        head=head.settings.model_dump(mode="json"),
        draft_vocab_size=vocab_size if vocabulary is None else len(vocabulary),
        draft_vocabulary="target" if vocabulary is None else "reduced",
        num_speculative_tokens=num_speculative_tokens,
        training={},
        provenance=provenance or {},
    )
    save_head(folder, head, metadata, vocabulary)
    return metadata
