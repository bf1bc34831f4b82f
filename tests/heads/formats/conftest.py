"""Tiny heads written as artifacts, with their target's folder, for exports and imports. In float32, for other libraries."""

import copy
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch

from configs.schema.heads import Eagle3Settings
from configs.schema.target import TargetConfig
from heads.formats.exporting.exporter import export
from heads.formats.exporting.source import TargetFolder, read_source
from heads.frozen.loading import load_target
from tests.support import family_checks as checks
from tests.support.tiny_heads import save_artifact


class Written:
    """A head, its artifact, and its target; `source` reads the artifact as an export does."""

    def __init__(self, folder, target, head):
        self.artifact, self.target_folder, self.out = folder / "artifact", Path(target.identity.name), folder / "written"
        self.target, self.model, self.head = target, target.model, head

    def source(self, **options):
        return read_source(self.artifact, TargetFolder(self.target_folder, str(self.target_folder)), **options)


@pytest.fixture(scope="session")
def float_target(tmp_path_factory, tiny_tokenizer):
    """A function that gives the tiny target of a family, loaded from a folder; only for reading."""

    @cache
    def make(family):
        folder = tmp_path_factory.mktemp("target")
        copy.deepcopy(checks.tiny_target(family)).float().save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        return load_target(TargetConfig(name=str(folder), dtype="float32", device="cpu"))

    return make


def write_head(folder, target, settings, vocabulary=None, num_speculative_tokens=3):
    """Make a random head of given settings, and write it."""
    head = checks.build(settings, target.model, vocabulary).requires_grad_(False)
    identity = target.identity.to_dict()
    save_artifact(folder / "artifact", head, identity, vocabulary, num_speculative_tokens=num_speculative_tokens)
    return Written(folder, target, head)


@pytest.fixture
def write(tmp_path, float_target):
    """A function that makes a random head of given settings on a tiny target, and writes it."""
    return lambda settings, family="llama", *args, folder=tmp_path, **options: write_head(
        folder, float_target(family), settings, *args, **options
    )


@pytest.fixture(scope="session")
def exported_once(tmp_path_factory, float_target):
    settings = Eagle3Settings(kind="eagle3", taps=[1, 2, 3], num_depths=3)
    written = write_head(tmp_path_factory.mktemp("eagle"), float_target("llama"), settings, checks.SOME_TOKENS)
    export(written.source(), "speculators", written.out)
    return written


@pytest.fixture
def exported(exported_once, tmp_path):
    """An EAGLE-3 head with a reduced vocabulary in the form of speculators."""
    written = copy.copy(exported_once)
    written.out = shutil.copytree(written.out, tmp_path / "exported")
    return written


@pytest.fixture
def text_ids():
    """A text of 24 tokens, `[1, T]`."""
    return torch.randint(1, checks.VOCAB_SIZE, (1, 24), generator=torch.Generator().manual_seed(6))
