"""What was exported, and MTP modules of checkpoints, come in the same in every form; ids and masks mean what writers mean."""

import json

import pytest
import torch
from safetensors.torch import load_file

from configs.runtime.errors import InputError
from configs.schema.heads import Eagle3Settings, LayerSettings, MtpSettings, PEagleSettings
from heads.artifact import load_draft
from heads.formats.exporting.exporter import export
from heads.formats.importing.importer import drafts_a_round, fit, write_artifact
from heads.formats.importing.reading import read_external
from heads.metadata import WEIGHTS_FILE
from tests.support import family_checks as checks
from tests.support import mtp_checkpoints as native

EAGLE = Eagle3Settings(kind="eagle3", taps=[1, 2, 3], num_depths=3)
PEAGLE = PEagleSettings(kind="peagle", taps=[1, 2, 3], num_layers=2, num_depths=3, mask_token_id=5)
DFLASH, DSPARK, DFLASH2, XPRESS, DOMINO, MEDUSA, MTP = (
    checks.SETTINGS[kind] for kind in ("dflash", "dspark", "dflash2", "xpress", "domino", "medusa", "mtp")
)
OWN_LAYER = LayerSettings(mlp_width=96, num_heads=8, num_key_value_heads=2, norm_epsilon=1e-3, rope_scaling=checks.LLAMA3)
OWN_PARTS = {"layer": OWN_LAYER, "norm_taps": False, "norm_joined_taps": True, "own_embedding": True}
PLAIN = {**checks.NO_NORMS, "train_head": True}
TRIPS = [
    (EAGLE, {}, "llama", "vllm"),
    (EAGLE, {}, "llama", "speculators"),
    (EAGLE, {"window": 4, "qk_norm": True}, "llama", "vllm"),
    (PEAGLE, {"qk_norm": True}, "qwen3", "vllm"),
    (EAGLE, {}, "llama", "sglang"),
    (EAGLE, {"norm_before_residual": True, "num_layers": 2}, "qwen3", "vllm"),
    (EAGLE, PLAIN, "llama", "sglang"),
    (EAGLE, OWN_PARTS, "llama", "vllm"),
    (EAGLE, {"layer": OWN_LAYER.model_copy(update={"rope_scaling": checks.YARN})}, "llama", "sglang"),
    (PEAGLE, {}, "llama", "vllm"),
    (PEAGLE, OWN_PARTS, "llama", "speculators"),
    (DFLASH, {}, "llama", "vllm"),
    (DFLASH, {"layer": OWN_LAYER}, "llama", "sglang"),
    (DSPARK, {}, "llama", "vllm"),
    (DSPARK, {"sample_from_anchor": True}, "llama", "speculators"),
    (DFLASH2, {}, "llama", "speculators"),
    (XPRESS, {}, "llama", "speculators"),
    (DOMINO, {}, "llama", "sglang"),
    (MEDUSA, {}, "llama", "vllm"),
    (MEDUSA, checks.OWN_HEADS, "llama", "vllm"),
    (MTP, {}, "llama", "vllm"),
]
WHOLE_ONLY = ("dflash2", "domino")  # whose form has no place for a reduced vocabulary
WITH_VOCABULARY = [
    pytest.param(*trip, vocabulary, id="-".join([trip[0].kind, *trip[1], trip[3], "reduced" if vocabulary else "whole"]))
    for trip in TRIPS
    for vocabulary in (None, checks.SOME_TOKENS)
    if vocabulary is None or trip[0].kind not in WHOLE_ONLY
]


def imported(written, folder):
    """Import what was written, and return the loaded draft."""
    external = read_external(written.out)
    fitted = fit(external, written.model)
    tokens = drafts_a_round(external, None, fitted.settings)
    write_artifact(fitted, folder, written.target, num_speculative_tokens=tokens, provenance={})
    return load_draft(folder, written.target.identity, written.model)


def assert_same_weights(folder, other):
    own, back = load_file(folder / WEIGHTS_FILE), load_file(other / WEIGHTS_FILE)
    assert own.keys() == back.keys()
    assert all(torch.equal(own[name], back[name]) for name in own)


@pytest.mark.parametrize(("settings", "options", "family", "engine", "vocabulary"), WITH_VOCABULARY)
def test_a_draft_comes_back_with_equal_weights_and_drafts(write, tmp_path, settings, options, family, engine, vocabulary):
    written = write(settings.model_copy(update=options), family, vocabulary)
    export(written.source(), engine, written.out)
    draft = imported(written, tmp_path / "back")
    before = load_draft(written.artifact, written.target.identity, written.model)
    drafted, logits_BGV = checks.first_drafts(written.target, before.proposer)
    again, again_BGV = checks.first_drafts(written.target, draft.proposer)
    if vocabulary is not None and draft.metadata.draft_vocabulary == "target":  # the form had no place for a reduced one
        ids_W = vocabulary.token_ids_W
        torch.testing.assert_close(again_BGV[:, 0, ids_W], logits_BGV[:, 0, ids_W], rtol=1e-5, atol=1e-4)
        return
    assert torch.equal(again, drafted)
    torch.testing.assert_close(again_BGV, logits_BGV, rtol=1e-5, atol=1e-4)
    assert_same_weights(written.artifact, tmp_path / "back")


def test_ids_of_hidden_states_can_be_taken_otherwise_than_the_form_says(write, exported):
    written = write(EAGLE, vocabulary=checks.SOME_TOKENS)
    export(written.source(), "sglang", written.out)
    assert read_external(written.out).settings["taps"] == [1, 2, 3]
    assert read_external(written.out, layer_ids="h").settings["taps"] == [0, 1, 2]
    assert read_external(exported.out).settings["taps"] == [1, 2, 3]
    assert read_external(exported.out, layer_ids="block_output").settings["taps"] == [2, 3, 4]


def test_a_flat_draft_with_a_mask_is_peagle(write):
    written = write(PEAGLE.model_copy(update={"num_depths": 8}))
    export(written.source(), "speculators", written.out)
    path = written.out / "config.json"
    config = json.loads(path.read_text())["transformer_layer_config"] | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "ptd_token_id": 5,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    path.write_text(json.dumps(config))
    assert fit(read_external(written.out), written.model).settings == written.head.settings


# --- a checkpoint's own MTP modules ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("naming", "reads"), [("mimo", "pre_norm"), ("deepseek", "post_norm")])
def test_a_module_of_a_checkpoint_is_a_draft_that_reads_what_its_family_does(tmp_path, naming, reads):
    model, folder = checks.tiny_target("qwen3"), tmp_path / "target"
    ours = native.write_modules(folder, model, naming, shards=3)
    fitted = fit(read_external(folder, reads="pre_norm"), model)
    assert fitted.taps == (native.BLOCKS,)  # the state before the final norm
    assert fitted.weights.keys() == ours.keys()
    assert all(torch.equal(fitted.weights[name], ours[name]) for name in ours)
    assert fit(read_external(folder), model).settings.reads == reads


def test_modules_alone_in_mimos_layout_are_taken_for_an_export(write):
    written = write(MtpSettings(kind="mtp", num_depths=2))
    export(written.source(), "vllm", written.out)
    assert fit(read_external(written.out), written.model).settings.reads == "post_norm"


def test_a_module_with_biases_for_a_block_without_is_refused_unless_they_are_0(tmp_path):
    model, name = checks.tiny_target("llama"), "model.mtp_layers.0.self_attn.q_proj.bias"
    for folder, bias in ((tmp_path / "idle", torch.zeros(32)), (tmp_path / "target", torch.ones(32))):
        native.write_modules(folder, model, "mimo", changes={name: bias})
    fit(read_external(tmp_path / "idle"), model)
    with pytest.raises(InputError, match=f"has no place in the head for {name}"):
        fit(read_external(tmp_path / "target"), model)
