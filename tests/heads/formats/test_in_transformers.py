"""Exported drafts decode in transformers, round by round from the logits that our own head gives there."""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, PhiConfig, PhiForCausalLM

from configs.schema.heads import DFlashSettings
from heads.artifact import save_draft_lm
from heads.formats.exporting.exporter import export
from heads.formats.exporting.source import TargetFolder, read_source
from heads.metadata import read_metadata
from heads.vocabulary import DraftVocabulary
from tests.support import family_checks as checks

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}


@pytest.mark.parametrize("vocabulary", [None, checks.SOME_TOKENS], ids=["whole", "reduced"])
@torch.no_grad()
def test_dflash(write, text_ids, vocabulary):
    settings = DFlashSettings(kind="dflash", taps=[1, 2, 3], block_size=4, mask_token_id=5)
    written = write(settings, vocabulary=vocabulary)
    export(written.source(), "transformers", written.out)
    draft, info = AutoModel.from_pretrained(written.out, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    rounds = []
    draft.register_forward_hook(lambda _, __, kwargs, output: rounds.append((kwargs, output)), with_kwargs=True)
    model = written.model
    plain = model.generate(text_ids, max_new_tokens=12, do_sample=False)
    answer = model.generate(text_ids, max_new_tokens=12, do_sample=False, assistant_model=draft, speculation_type="dflash")
    assert torch.equal(answer, plain)
    assert len(rounds) > 3
    for kwargs, output in rounds:
        length = int(kwargs["position_ids"][0, -4]) + 1  # slot 0 is the pending token
        row = answer[0, :length].tolist()
        logits_BGV = model.get_output_embeddings()(output.last_hidden_state[:, 1:])
        expected = checks.trained_logits(written.head, model, [row], [[1, 1, 1]])
        drafted_BGW = logits_BGV if vocabulary is None else logits_BGV[..., vocabulary.token_ids_W]
        torch.testing.assert_close(drafted_BGW, expected, **TOLERANCE)


@torch.no_grad()
def test_a_draft_lm_drafts_the_number_of_tokens_it_was_made_for(tiny_run, tmp_path, text_ids):
    source = read_source(tiny_run / "artifact", TargetFolder(tiny_run / "target", str(tiny_run / "target")))
    export(source, "transformers", tmp_path / "out")
    target = AutoModelForCausalLM.from_pretrained(tiny_run / "target")
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    widths = []
    target.register_forward_hook(lambda _, __, kwargs, ___: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    answer = target.generate(text_ids, max_new_tokens=12, do_sample=False, assistant_model=draft)
    assert max(widths[1:]) == read_metadata(tiny_run / "artifact").num_speculative_tokens + 1
    assert torch.equal(answer, target.generate(text_ids, max_new_tokens=12, do_sample=False))


def with_head_bias(**_):
    """Return a model whose output head has a bias that is large for every other token of the draft vocabulary below."""
    torch.manual_seed(1)
    model = PhiForCausalLM(PhiConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1)).eval()
    model.lm_head.bias.uniform_(-15, -5)  # every logit of which is below 0
    return model


@torch.no_grad()
@pytest.mark.parametrize("kind", ["untied", "tied", "bias"])
def test_a_draft_lm_of_a_reduced_vocabulary_says_no_other_token(tiny_run, tiny_llama, tiny_tokenizer, tmp_path, text_ids, kind):
    make = with_head_bias if kind == "bias" else tiny_llama
    draft = make(seed=1, dtype=torch.float32, tie_word_embeddings=kind == "tied")
    vocabulary = DraftVocabulary(token_ids_W=torch.arange(0, 64, 3), target_vocab_size=64)
    sizes = {"draft_vocabulary": "reduced", "draft_vocab_size": len(vocabulary)}
    metadata = read_metadata(tiny_run / "artifact").model_copy(update=sizes)
    save_draft_lm(tmp_path / "artifact", draft, tiny_tokenizer, metadata, vocabulary)
    source = read_source(tmp_path / "artifact", TargetFolder(tiny_run / "target", str(tiny_run / "target")))
    export(source, "transformers", tmp_path / "out")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not written.config.tie_word_embeddings  # by which other engines would leave the head out
    there_TV, here_TV = written(text_ids).logits[0], draft(text_ids).logits[0]
    ids_W = vocabulary.token_ids_W
    torch.testing.assert_close(there_TV[:, ids_W], here_TV[:, ids_W])
    assert torch.equal(there_TV.argmax(1), ids_W[here_TV[:, ids_W].argmax(1)])
    assert not torch.equal(there_TV.argmax(1), here_TV.argmax(1))
