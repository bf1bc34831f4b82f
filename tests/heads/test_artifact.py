"""An artifact round-trips, loads in transformers as it is, and refuses what it was not made for; so do models as found."""

import dataclasses
import os

import numpy as np
import pytest
import torch

from configs.runtime.errors import InputError
from heads.artifact import load_draft, save_draft_lm
from heads.metadata import hash_artifact
from heads.vocabulary import DraftVocabulary
from tests.support.decoding import metadata_of_draft_lm


@pytest.fixture
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1, dtype=torch.float32))


@pytest.fixture
def draft(tiny_llama):
    return tiny_llama(seed=2, layers=1, dtype=torch.float32)


@pytest.fixture
def metadata(target):
    return metadata_of_draft_lm(target.identity.to_dict())


@pytest.fixture
def folder(tmp_path, draft, target, metadata):
    save_draft_lm(tmp_path / "artifact", draft, target.tokenizer, metadata)
    return tmp_path / "artifact"


def test_it_comes_back_as_it_was_written(folder, target, draft, metadata):
    loaded = load_draft(folder, target.identity, target.model)
    assert loaded.metadata == metadata
    assert loaded.warnings == []
    assert loaded.num_parameters == sum(parameter.numel() for parameter in draft.parameters())
    for name, tensor in draft.state_dict().items():
        assert torch.equal(loaded.proposer.model.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("field", "words"),
    [("weights_sha256", "target weights"), ("chat_template_sha256", "chat template"), ("tokenizer_sha256", "tokenizer")],
)
def test_another_target_is_refused_and_can_be_allowed_with_a_warning_but_for_its_tokenizer(folder, target, field, words):
    other = dataclasses.replace(target.identity, **{field: "1" * 64})
    with pytest.raises(InputError, match=words):
        load_draft(folder, other, target.model, allow_target_mismatch=field == "tokenizer_sha256")
    if field != "tokenizer_sha256":
        assert words in load_draft(folder, other, target.model, allow_target_mismatch=True).warnings[0]


def test_a_reduced_draft_comes_back_with_the_rows_of_its_vocabulary(tmp_path, target, draft, metadata):
    vocabulary = DraftVocabulary(token_ids_W=torch.tensor([1, 5, 8, 30, 63]), target_vocab_size=64)
    metadata = metadata.model_copy(update={"draft_vocabulary": "reduced", "draft_vocab_size": 5})
    save_draft_lm(tmp_path, draft, target.tokenizer, metadata, vocabulary)
    loaded = load_draft(tmp_path, target.identity, target.model)
    assert loaded.metadata == metadata
    assert torch.equal(loaded.proposer.vocabulary.token_ids_W, vocabulary.token_ids_W)
    assert torch.equal(loaded.proposer.model.lm_head.weight, draft.lm_head.weight[vocabulary.token_ids_W])
    assert torch.equal(loaded.proposer.model.get_input_embeddings().weight, draft.get_input_embeddings().weight)


def test_its_hash_covers_every_file_that_a_loader_reads_by_content(tmp_path, target, draft, metadata, monkeypatch):
    monkeypatch.setattr("heads.frozen.identity.REMEMBERED_BYTES", 0)
    vocabulary = DraftVocabulary(token_ids_W=torch.tensor([1, 5, 8, 30, 63]), target_vocab_size=64)
    metadata = metadata.model_copy(update={"draft_vocabulary": "reduced", "draft_vocab_size": 5})
    save_draft_lm(tmp_path, draft, target.tokenizer, metadata, vocabulary, np.array([1, 2]))
    before, files = hash_artifact(tmp_path), sorted(tmp_path.iterdir())
    assert before == load_draft(tmp_path, target.identity, target.model).sha256
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} < {file.name for file in files}
    for file in files:
        content, state = file.read_bytes(), file.stat()
        file.write_bytes(content[:-1] + b"x")
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
        assert hash_artifact(tmp_path) != before, file.name
        file.write_bytes(content)
    for name in ("merges.txt", "adapter_model.safetensors", "additional_chat_templates/tools.jinja"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
        assert hash_artifact(tmp_path) != before, name
        (tmp_path / name).unlink()
    (tmp_path / "report.json").write_text("{}")  # names the hash
    assert hash_artifact(tmp_path) == before


# --- models that are no artifacts ---------------------------------------------------------------------------------


@pytest.fixture
def save(tmp_path, tiny_llama, tiny_tokenizer):
    """Return a function that writes a small model with its tokenizer, as transformers does."""

    def write(tokenizer=tiny_tokenizer, shard_size="1GB", **settings):
        folder = tmp_path / "tiny-model"
        tiny_llama(seed=2, layers=1, dtype=torch.float32, **settings).save_pretrained(folder, max_shard_size=shard_size)
        tokenizer.save_pretrained(folder)
        return folder

    return write


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_a_model_of_the_same_tokenizer_is_a_draft_lm(save, target, shard_size):
    folder = save(shard_size=shard_size)
    draft = load_draft(folder, target.identity, target.model)
    assert (draft.metadata.kind, draft.sha256) == ("draft_lm", hash_artifact(folder))
    assert draft.warnings == [f"the draft {folder} is a model as it was found, not trained by draftsmith for tiny"]


@pytest.mark.parametrize("vocab_size", [61, 72])
def test_its_embedding_may_be_padded_otherwise_than_the_targets(save, target, vocab_size):
    draft = load_draft(save(vocab_size=vocab_size), target.identity, target.model)
    assert draft.proposer.vocab_size == min(64, vocab_size)


def test_a_model_of_another_tokenizer_is_refused_whatever_is_allowed(save, target, tiny_tokenizer):
    other = type(tiny_tokenizer)(tokenizer_object=tiny_tokenizer.backend_tokenizer, eos_token="<user>")
    folder = save(tokenizer=other)
    with pytest.raises(InputError, match="its tokenizer is another"):
        load_draft(folder, target.identity, target.model, allow_target_mismatch=True)


def test_the_output_folder_of_a_training_stands_for_its_artifact(tiny_run, target):
    named = [
        load_draft(folder, target.identity, target.model, allow_target_mismatch=True)
        for folder in (tiny_run, tiny_run / "artifact")
    ]
    assert named[0].sha256 == named[1].sha256
