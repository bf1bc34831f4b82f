"""A checkpoint's own MTP modules come in as a draft under every naming; what has no place is named."""

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.heads import MtpSettings
from heads.formats.exporting.exporter import export
from heads.formats.importing.importer import fit
from heads.formats.importing.reading import read_external
from tests.support import family_checks as checks
from tests.support import mtp_checkpoints as native


@pytest.mark.parametrize(
    ("naming", "shards", "reads"),
    [("qwen3_next", 1, "post_norm"), ("mimo", 3, "pre_norm"), ("deepseek", 3, "post_norm"), ("transformers", 3, "post_norm")],
)
def test_a_module_of_a_checkpoint_is_a_draft_that_reads_what_its_family_does(tmp_path, naming, shards, reads):
    model, folder = checks.tiny_target("qwen3"), tmp_path / "target"
    ours = native.write_modules(folder, model, naming, shards=shards)
    fitted = fit(read_external(folder, reads="pre_norm"), model)
    assert fitted.settings.shared_depths
    assert fitted.taps == (native.BLOCKS,)  # the state before the final norm
    found = fitted.weights
    assert found.keys() == ours.keys()
    assert all(torch.equal(found[name], ours[name]) for name in ours)
    assert fit(read_external(folder), model).settings.reads == reads
    assert fit(read_external(folder, reads="post_norm"), model).settings.reads == "post_norm"


def test_modules_alone_in_mimos_layout_are_taken_for_an_export(write):
    written = write(MtpSettings(kind="mtp", num_depths=2))
    export(written.source(), "vllm", written.out)
    assert fit(read_external(written.out), written.model).settings.reads == "post_norm"


def test_several_modules_are_one_for_each_depth(tmp_path):
    model = checks.tiny_target("qwen3")
    ours = native.write_modules(tmp_path / "target", model, "deepseek", modules=2)
    external = read_external(tmp_path / "target")
    fitted = fit(external, model)
    assert (fitted.settings.shared_depths, fitted.settings.num_depths, external.num_speculative_tokens) == (False, 2, 2)
    assert all(torch.equal(value, ours[name]) for name, value in fitted.weights.items())


def test_a_module_with_biases_for_a_block_without_is_refused_unless_they_are_0(tmp_path):
    model, name = checks.tiny_target("llama"), "model.mtp_layers.0.self_attn.q_proj.bias"
    for folder, bias in ((tmp_path / "idle", torch.zeros(32)), (tmp_path / "target", torch.ones(32))):
        native.write_modules(folder, model, "mimo", changes={name: bias})
    fit(read_external(tmp_path / "idle"), model)
    with pytest.raises(InputError, match=f"has no place in the head for {name}"):
        fit(read_external(tmp_path / "target"), model)
