"""llama.cpp's real converter: what it makes of our exports holds our weights, as transformers and GGUF's reader see them.

Slow: `make serve-check` fetches the converter and runs this. That llama.cpp drafts with these files what we draft is what
`scripts/lab/benchmark.py serve` finds out. The vocabulary is SmolLM2's, which the converter knows; the layers are tiny.
"""

from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from configs.schema.heads import Eagle3Settings
from configs.schema.target import TargetConfig
from heads.artifact import save_draft_lm
from heads.formats.exporting.exporter import export
from heads.formats.exporting.gguf import FILE, find_converter
from heads.formats.exporting.source import TargetFolder, read_source
from heads.frozen.loading import load_target
from heads.metadata import Metadata
from heads.vocabulary import DraftVocabulary
from tests.support import family_checks as checks
from tests.support.artifacts import save_artifact

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore")]
STEP = 12  # every so many tokens is one of the draft vocabulary


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny random target with SmolLM2's tokenizer, loaded from its folder."""
    find_converter()
    embedded = load_target(TargetConfig(device="cpu"))
    size = embedded.vocab_size
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    embedded.tokenizer.save_pretrained(folder)
    return load_target(TargetConfig(name=str(folder), dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def vocabulary(target):
    return DraftVocabulary(token_ids_W=torch.arange(0, target.vocab_size, STEP), target_vocab_size=target.vocab_size)


def exported(artifact, target, out):
    """Export an artifact as GGUF; return the file's path."""
    folder = Path(target.identity.name)
    export(read_source(artifact, TargetFolder(folder, str(folder))), "gguf", out)
    return out / FILE


@torch.no_grad()
def test_a_draft_lm_comes_back_with_equal_logits(target, vocabulary, tmp_path):
    metadata = Metadata(
        kind="draft_lm",
        target=target.identity.to_dict(),
        draft_vocab_size=len(vocabulary),
        draft_vocabulary="reduced",
        num_speculative_tokens=3,
        training={},
        provenance={},
    )
    save_draft_lm(tmp_path / "artifact", target.model, target.tokenizer, metadata, vocabulary)
    path = exported(tmp_path / "artifact", target, tmp_path / "out")
    back = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ids_1T = torch.arange(100, 9000, 400).unsqueeze(0)
    theirs_TV, ours_TV = back(ids_1T).logits[0], target.model(ids_1T).logits[0]
    ids_W = vocabulary.token_ids_W
    torch.testing.assert_close(theirs_TV[:, ids_W], ours_TV[:, ids_W], rtol=1e-4, atol=1e-5)
    assert torch.equal(theirs_TV.argmax(1), ids_W[ours_TV[:, ids_W].argmax(1)])


def test_eagle_keeps_its_taps_and_its_tokens(target, vocabulary, tmp_path):
    settings = Eagle3Settings(kind="eagle3", taps=[1, 2, 3])
    head = checks.build(settings, target.model, vocabulary).requires_grad_(False)
    save_artifact(tmp_path / "artifact", head, target.identity.to_dict(), vocabulary)
    reader = gguf.GGUFReader(exported(tmp_path / "artifact", target, tmp_path / "out"))
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    assert reader.fields["eagle3.target_layers"].contents() == [1, 2, 3]
    assert reader.fields["eagle3.norm_before_residual"].contents() is False
    assert torch.equal(torch.tensor(tensors["d2t"]), vocabulary.token_ids_W)
    assert torch.equal(torch.tensor(tensors["fc.weight"]), head.fc.weight)
