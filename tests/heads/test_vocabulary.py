"""A reduced vocabulary names tokens of the target in rising order, cuts the head to them, and comes back from the disk."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from configs.runtime.errors import InputError
from heads.inference.causal_lm import HeadRows, head_logits
from heads.vocabulary import DraftVocabulary, keep_head_rows, read_draft_vocabulary

IDS = [0, 3, 7, 40, 63]


def vocabulary_of(ids, size=64):
    return DraftVocabulary(token_ids_W=torch.tensor(ids), target_vocab_size=size)


@pytest.mark.parametrize(
    ("ids", "words"),
    [([], "int64"), ([1.0, 2.0], "int64"), ([3, 2], "rise"), ([3, 3], "rise"), ([-1, 2], "id -1"), ([3, 64], "id 64")],
)
def test_ids_that_name_no_tokens_of_the_target_are_refused(ids, words):
    with pytest.raises(ValueError, match=words):
        vocabulary_of(ids)


@pytest.mark.parametrize("tied", [True, False])
def test_a_cut_head_gives_the_chosen_logits_of_the_whole_one_and_reads_every_token(tiny_llama, tied):
    model = tiny_llama(tie_word_embeddings=tied)
    ids = torch.arange(64).unsqueeze(0)
    whole = model(input_ids=ids).logits
    keep_head_rows(model, vocabulary_of(IDS))
    model.tie_weights()
    torch.testing.assert_close(model(input_ids=ids).logits, whole[..., IDS], rtol=0, atol=1e-12)
    assert not model.get_output_embeddings().weight.requires_grad


def test_a_cut_head_keeps_its_bias_and_the_soft_cap_of_its_architecture(tiny_llama):
    model = tiny_llama()
    model.config.final_logit_softcapping = 2.0
    head = nn.Linear(32, 64, dtype=torch.float64)
    model.set_output_embeddings(head)
    hidden = torch.randn(3, 32, dtype=torch.float64)
    whole = head_logits(model, hidden)
    torch.testing.assert_close(HeadRows.of(model, torch.tensor(IDS)).logits(hidden), whole[..., IDS], rtol=0, atol=1e-12)
    keep_head_rows(model, vocabulary_of(IDS))
    torch.testing.assert_close(head_logits(model, hidden), whole[..., IDS], rtol=0, atol=1e-12)


def test_a_head_without_such_rows_or_that_is_not_linear_is_refused(tiny_llama):
    with pytest.raises(InputError, match="token 63"):
        keep_head_rows(tiny_llama(vocab_size=50), vocabulary_of(IDS))
    model = tiny_llama()
    model.set_output_embeddings(nn.Sequential(model.get_output_embeddings()))
    with pytest.raises(InputError, match="head of type Sequential"):
        keep_head_rows(model, vocabulary_of(IDS))


MARKS = [n in IDS for n in range(64)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"d2t": IDS}, "t2d"),
        ({"d2t": IDS, "t2d": [int(mark) for mark in MARKS]}, "t2d"),
        ({"d2t": [0, 7, 3, 40, 63], "t2d": MARKS}, "must rise"),
        ({"d2t": [0, 3, 8, 40, 63], "t2d": MARKS}, "t2d"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_missing_or_contradicts_itself_is_refused_by_name(tmp_path, content, words):
    path = tmp_path / "v.safetensors"
    if content is not None:
        save_file({name: torch.tensor(values) for name, values in content.items()}, path)
    with pytest.raises(InputError, match=rf"v\.safetensors.*{words}"):
        read_draft_vocabulary(path)
