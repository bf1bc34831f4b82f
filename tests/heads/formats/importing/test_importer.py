"""What was exported comes back the same; what our heads cannot be is refused, with every name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.runtime.errors import InputError
from configs.schema.heads import DFlashSettings, Eagle3Settings, LayerSettings, MedusaSettings, MtpSettings, PEagleSettings
from heads.artifact import WEIGHTS_FILE, load_draft
from heads.formats.exporting.exporter import export
from heads.formats.importing.importer import drafts_a_round, fit, write_artifact
from heads.formats.importing.reading import read_external
from tests.support import family_checks as checks

EAGLE = Eagle3Settings(kind="eagle3", taps=[1, 2, 3], num_depths=3)
PEAGLE = PEagleSettings(kind="peagle", taps=[1, 2, 3], num_layers=2, num_depths=3, mask_token_id=5)
DFLASH = DFlashSettings(kind="dflash", taps=[1, 2, 3], block_size=4, mask_token_id=5)
MEDUSA = MedusaSettings(kind="medusa", num_depths=3, num_layers=2)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
OWN_LAYER = LayerSettings(mlp_width=96, num_heads=8, num_key_value_heads=2, norm_epsilon=1e-3, rope_scaling=LLAMA3)
OWN_PARTS = {"layer": OWN_LAYER, "norm_joined_taps": True, "own_embedding": True}
OWN_HEADS = {"train_head": True, "own_output_heads": True}
TRIPS = [
    (EAGLE, "llama", "vllm"),
    (EAGLE, "llama", "speculators"),
    (EAGLE, "llama", "sglang"),
    (EAGLE.model_copy(update={"norm_before_residual": True, "num_layers": 2}), "qwen3", "vllm"),
    (EAGLE.model_copy(update={"norm_taps": True, "norm_feedback": True}), "llama", "sglang"),
    (EAGLE.model_copy(update={"train_head": True}), "llama", "vllm"),
    (PEAGLE, "llama", "vllm"),
    (EAGLE.model_copy(update=OWN_PARTS), "llama", "vllm"),
    (EAGLE.model_copy(update={"layer": OWN_LAYER.model_copy(update={"rope_scaling": YARN})}), "llama", "sglang"),
    (PEAGLE.model_copy(update=OWN_PARTS), "llama", "speculators"),
    (DFLASH, "llama", "vllm"),
    (DFLASH.model_copy(update={"layer": OWN_LAYER}), "llama", "transformers"),
    (DFLASH, "llama", "sglang"),
    (DFLASH, "llama", "transformers"),
    (MEDUSA, "llama", "vllm"),
    (MEDUSA.model_copy(update=OWN_HEADS), "llama", "vllm"),
    (MEDUSA.model_copy(update=OWN_HEADS), "llama", "tensorrt_llm"),
    (MtpSettings(kind="mtp", num_depths=3), "qwen3", "speculators"),
    (MtpSettings(kind="mtp", num_depths=3, concat_order="hidden_first"), "qwen3", "speculators"),
    (MtpSettings(kind="mtp", num_depths=3), "llama", "vllm"),
    (MtpSettings(kind="mtp", num_depths=3, concat_order="hidden_first"), "llama", "vllm"),
    (MtpSettings(kind="mtp", num_depths=3, shared_depths=False), "qwen3", "transformers"),
]


def imported(written, folder, **options):
    """Import what was written, and return the loaded draft."""
    external = read_external(written.out, **options)
    fitted = fit(external, written.model)
    tokens = drafts_a_round(external, None, fitted.settings)
    write_artifact(
        fitted, folder, written.target.identity, vocab_size=checks.VOCAB_SIZE, num_speculative_tokens=tokens, provenance={}
    )
    return load_draft(folder, written.target.identity, written.model)


WITH_VOCABULARY = [
    pytest.param(*trip, vocabulary, id=f"{trip[0].kind}-{trip[2]}-{number}-{'reduced' if vocabulary else 'whole'}")
    for number, trip in enumerate(TRIPS)
    for vocabulary in (None, checks.SOME_TOKENS)
]


@pytest.mark.parametrize(("settings", "family", "engine", "vocabulary"), WITH_VOCABULARY)
def test_a_draft_comes_back_with_equal_weights_and_drafts(write, tmp_path, settings, family, engine, vocabulary):
    written = write(settings, family, vocabulary)
    export(written.source(), engine, written.out)
    draft = imported(written, tmp_path / "back")
    before = load_draft(written.artifact, written.target.identity, written.model)
    whole_now = draft.metadata.draft_vocabulary == "target"
    drafted, logits_BGV = checks._drafts(written.target, before.proposer)
    again, again_BGV = checks._drafts(written.target, draft.proposer)
    if vocabulary is not None and whole_now:  # the form had no place for the reduced vocabulary
        ids_W = vocabulary.token_ids_W
        torch.testing.assert_close(again_BGV[:, 0, ids_W], logits_BGV[:, 0, ids_W], rtol=1e-5, atol=1e-4)
        return
    assert torch.equal(again, drafted)
    torch.testing.assert_close(again_BGV, logits_BGV, rtol=1e-5, atol=1e-4)
    if getattr(settings, "concat_order", "embedding_first") == "embedding_first":
        own, back = load_file(written.artifact / WEIGHTS_FILE), load_file(tmp_path / "back" / WEIGHTS_FILE)
        assert own.keys() == back.keys()
        assert all(torch.equal(own[name], back[name]) for name in own)


def test_published_medusa_names_are_read(write, tmp_path):
    written = write(MEDUSA.model_copy(update=OWN_HEADS))
    own = load_file(written.artifact / WEIGHTS_FILE)
    named = {}
    for name, value in own.items():
        parts = name.split(".")
        theirs = f"{parts[1]}.2.weight" if parts[0] == "lm_heads" else f"{parts[1]}.{parts[3]}.linear.{parts[4]}"
        named[theirs] = value
    written.out.mkdir()
    torch.save(named, written.out / "medusa_lm_head.pt")
    (written.out / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 2}))
    imported(written, tmp_path / "back")
    back = load_file(tmp_path / "back" / WEIGHTS_FILE)
    assert back.keys() == own.keys()
    assert all(torch.equal(own[name], back[name]) for name in own)


def change_config(written, **values):
    path = written.out / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(written, **values):
    tensors = load_file(written.out / WEIGHTS_FILE)
    save_file({name: value for name, value in (tensors | values).items() if value is not None}, written.out / WEIGHTS_FILE)


@pytest.fixture
def exported(write):
    """An EAGLE-3 head with a reduced vocabulary in the form of speculators."""
    written = write(EAGLE, vocabulary=checks.SOME_TOKENS)
    export(written.source(), "speculators", written.out)
    return written


def test_every_unknown_and_missing_tensor_is_named(exported):
    change_weights(
        exported, **{"norm.weight": None, "gate.weight": torch.ones(2), "layers.0.self_attn.q_proj.bias": torch.ones(3)}
    )
    with pytest.raises(InputError, match=r"lacks norm.weight; holds unknown gate.weight, layers.0.self_attn.q_proj.bias"):
        fit(read_external(exported.out), exported.model)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"embed_tokens.weight": torch.ones(64, 31)}, r"embed_tokens.weight of shape \[64, 31\] where \[64, 32\] is expected"),
        ({"embed_tokens.weight": torch.ones(64, 32, dtype=torch.int64)}, "expected floating numbers, and embed_tokens.weight"),
        ({"lm_head.weight": torch.ones(32, 32, dtype=torch.int32)}, "expected floating numbers, and lm_head.weight"),
        ({"d2t": torch.arange(1, 64, 2)}, "outside the target's vocabulary"),
        ({"d2t": torch.arange(32)}, "t2d marks other tokens"),
        ({"d2t": torch.zeros(32, dtype=torch.int64) - torch.arange(32)}, "must rise"),
    ],
)
def test_wrong_tensors_are_refused(exported, tensors, words):
    change_weights(exported, **tensors)
    with pytest.raises(InputError, match=words):
        fit(read_external(exported.out), exported.model)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"norm_before_fc": True}, "lacks input_norm.weight"),
        ({"speculators_model_type": "xpress"}, "'xpress' is none of eagle3, peagle, dflash, mtp"),
        ({"transformer_layer_config": None}, "expected transformer_layer_config to be a section"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"fc.weight of shape \[32, 96\] where \[32, 64\] is expected"),
    ],
)
def test_wrong_configs_are_refused(exported, values, words):
    change_config(exported, **values)
    with pytest.raises(InputError, match=words):
        fit(read_external(exported.out), exported.model)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"intermediate_size": 96}, r"mlp.down_proj.weight of shape \[32, 48\] where \[32, 96\] is expected"),
        ({"num_key_value_heads": 3}, "4 heads and 3 key-value heads"),
        ({"hidden_size": 16}, "are 16 wide and the target's states 32"),
        ({"hidden_act": "gelu"}, "the activation gelu"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 8}, "has sliding layers"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rotary embeddings of type dynamic"),
    ],
)
def test_other_layers_than_ours_are_refused(exported, values, words):
    layers = json.loads((exported.out / "config.json").read_text())["transformer_layer_config"] | values
    if "layer_types" in values:
        layers["model_type"] = "qwen3"
    change_config(exported, transformer_layer_config=layers)
    with pytest.raises(InputError, match=words):
        fit(read_external(exported.out), exported.model)


def test_ids_in_a_flat_config_can_be_taken_as_they_stand(write):
    written = write(EAGLE, vocabulary=checks.SOME_TOKENS)
    export(written.source(), "sglang", written.out)
    assert read_external(written.out).settings["taps"] == [1, 2, 3]
    assert read_external(written.out, layer_ids="h").settings["taps"] == [0, 1, 2]


def test_ids_in_a_nested_config_can_be_taken_for_those_of_blocks(exported):
    assert read_external(exported.out).settings["taps"] == [1, 2, 3]
    assert read_external(exported.out, layer_ids="block_output").settings["taps"] == [2, 3, 4]


def test_a_flat_draft_with_a_mask_is_peagle(write, tmp_path):
    written = write(PEAGLE.model_copy(update={"num_depths": 8}))
    export(written.source(), "speculators", written.out)
    config = json.loads((written.out / "config.json").read_text())
    layers = config["transformer_layer_config"] | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "ptd_token_id": config["mask_token_id"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    (written.out / "config.json").write_text(json.dumps(layers))
    fitted = fit(read_external(written.out), written.model)
    assert fitted.settings == written.head.settings


def test_a_flat_draft_with_two_mask_tokens_is_refused(write):
    written = write(PEAGLE)
    export(written.source(), "speculators", written.out)
    layers = json.loads((written.out / "config.json").read_text())["transformer_layer_config"]
    masks = {"ptd_token_id": 5, "mask_token_id": 6, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    (written.out / "config.json").write_text(json.dumps(layers | masks | {"architectures": ["LlamaForCausalLMEagle3"]}))
    with pytest.raises(InputError, match="different mask tokens: mask_token_id 6, ptd_token_id 5; leave the one"):
        read_external(written.out)


def test_an_unknown_form_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Something"]}')
    save_file({"a": torch.ones(1)}, tmp_path / WEIGHTS_FILE)
    with pytest.raises(InputError, match="in no form that draftsmith reads"):
        read_external(tmp_path)
