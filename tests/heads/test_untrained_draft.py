"""Any causal LM with the target's tokenizer drafts as it is; one with another tokenizer is refused with the reason."""

import pytest
import torch

from configs.runtime.errors import InputError
from heads.artifact import load_draft
from heads.frozen.identity import hash_weights


@pytest.fixture
def target(tiny_llama, as_target):
    return as_target(tiny_llama(seed=1, dtype=torch.float32))


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
    assert (draft.metadata.kind, draft.sha256) == ("draft_lm", hash_weights(folder))
    assert draft.warnings == [f"the draft {folder} is a model as it was found, not trained by draftsmith for tiny"]


@pytest.mark.parametrize("vocab_size", [64, 61, 72])
def test_its_embedding_may_be_padded_otherwise_than_the_targets(save, target, vocab_size):
    draft = load_draft(save(vocab_size=vocab_size), target.identity, target.model)
    assert draft.proposer.vocab_size == min(64, vocab_size)


def test_a_model_of_another_tokenizer_is_refused_whatever_is_allowed(save, target, tiny_tokenizer):
    other = type(tiny_tokenizer)(tokenizer_object=tiny_tokenizer.backend_tokenizer, eos_token="<user>")
    folder = save(tokenizer=other)
    with pytest.raises(InputError, match="cannot draft for tiny: its tokenizer is another"):
        load_draft(folder, target.identity, target.model, allow_target_mismatch=True)


@pytest.mark.parametrize(
    ("missing", "words"), [("tokenizer*", "nor a causal LM with its tokenizer"), ("*.safetensors", "holds none of")]
)
def test_a_folder_that_lacks_tokenizer_or_weights_is_refused_in_a_sentence(save, target, missing, words):
    folder = save()
    for path in folder.glob(missing):
        path.unlink()
    with pytest.raises(InputError, match=words):
        load_draft(folder, target.identity, target.model)


def test_the_output_folder_of_a_training_stands_for_its_artifact(tiny_run, target):
    named = [
        load_draft(folder, target.identity, target.model, allow_target_mismatch=True)
        for folder in (tiny_run, tiny_run / "artifact")
    ]
    assert named[0].sha256 == named[1].sha256
