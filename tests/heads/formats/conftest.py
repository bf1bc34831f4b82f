"""Tiny heads written as artifacts, with their target's folder, for exports and imports. In float32, for other libraries."""

import copy

import pytest
import torch

from configs.schema.target import TargetConfig
from heads.artifact import HiddenStates, Metadata, save_head
from heads.formats.exporting.source import TargetFolder, read_source
from heads.target.loading import load_target
from tests.support import family_checks as checks


class Written:
    """A head, its artifact, and its target; `source` reads the artifact as an export does."""

    def __init__(self, folder, target, head, vocabulary):
        self.artifact, self.target_folder, self.out = folder / "artifact", folder / "target", folder / "written"
        self.target, self.head, self.vocabulary = target, head, vocabulary

    @property
    def model(self):
        return self.target.model

    def source(self, **options):
        return read_source(self.artifact, TargetFolder(self.target_folder, str(self.target_folder)), **options)


@pytest.fixture
def write(tmp_path, tiny_tokenizer):
    """A function that makes a random head of given settings on a tiny target, and writes both."""

    def make(settings, family="llama", vocabulary=None, num_speculative_tokens=3):
        copy.deepcopy(checks.tiny_target(family)).float().save_pretrained(tmp_path / "target")
        tiny_tokenizer.save_pretrained(tmp_path / "target")
        target = load_target(TargetConfig(name=str(tmp_path / "target"), dtype="float32", device="cpu"))
        head = checks.build(settings, target.model, vocabulary).requires_grad_(False)
        states = HiddenStates(taps=list(head.taps), concat_order=[f"h_{tap}" for tap in head.taps], last_is_post_norm=True)
        metadata = Metadata(
            kind=settings.kind,
            target=target.identity.to_dict(),
            hidden_states=states,
            head=head.settings.model_dump(mode="json"),
            draft_vocab_size=target.vocab_size if vocabulary is None else len(vocabulary),
            draft_vocabulary="target" if vocabulary is None else "reduced",
            num_speculative_tokens=num_speculative_tokens,
            training={},
            provenance={},
        )
        save_head(tmp_path / "artifact", head, metadata, vocabulary)
        return Written(tmp_path, target, head, vocabulary)

    return make


@pytest.fixture
def text_ids():
    """A text of 24 tokens, `[1, T]`."""
    return torch.randint(1, checks.VOCAB_SIZE, (1, 24), generator=torch.Generator().manual_seed(6))
