"""An export has the names, ids, offsets and serving lines that its engine reads, and refuses what cannot be."""

import ast
import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.runtime.errors import InputError
from configs.schema.heads import DFlashSettings, Eagle3Settings, HydraSettings, LayerSettings, MedusaSettings, MtpSettings
from heads.formats.exporting.exporter import FORMS, SERVE_FILE, export
from heads.formats.exporting.source import TargetFolder, read_source
from heads.metadata import METADATA_FILE, WEIGHTS_FILE
from tests.support import family_checks as checks
from tests.support.quantized_checkpoints import Scheme, fp8, quantise

EAGLE = Eagle3Settings(kind="eagle3", taps=[1, 2, 3])
DFLASH = DFlashSettings(kind="dflash", taps=[1, 2, 3], block_size=4, mask_token_id=5)
MTP = MtpSettings(kind="mtp")


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_a_reduced_vocabulary_is_written_as_offsets_and_a_whole_one_as_each_engine_wants_it(write, tmp_path):
    written = write(EAGLE, vocabulary=checks.SOME_TOKENS)
    written.target_folder = Path(shutil.copytree(written.target_folder, tmp_path / "target"))
    (written.target_folder / "generation_config.json").write_text('{"repetition_penalty": 1.05, "do_sample": false}')
    export(written.source(dtype=torch.bfloat16), "vllm", written.out)
    assert "repetition_penalty 1.05" in (written.out / SERVE_FILE).read_text()
    tensors = load_file(written.out / WEIGHTS_FILE)
    assert torch.equal(tensors["fc.weight"], written.head.fc.weight.bfloat16())
    assert config_of(written.out)["dtype"] == "bfloat16"
    assert tensors["d2t"].dtype == torch.int64
    assert (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).tolist() == list(range(1, checks.VOCAB_SIZE, 2))
    assert tensors["t2d"].nonzero().squeeze(1).tolist() == list(range(1, checks.VOCAB_SIZE, 2))


def test_ids_layers_and_output_head_are_described_to_each_engine(write, tmp_path):
    scaling = {"rope_type": "linear", "factor": 2.0}
    written = write(EAGLE.model_copy(update={"layer": LayerSettings(mlp_width=80, rope_theta=500.0, rope_scaling=scaling)}))
    export(written.source(), "vllm", tmp_path / "one")
    export(written.source(), "sglang", tmp_path / "other")
    one, other = (config_of(tmp_path / name) for name in ("one", "other"))
    assert one["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert other["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    layers = one["transformer_layer_config"]
    assert (layers["intermediate_size"], layers["rope_parameters"]) == (80, scaling | {"rope_theta": 500.0})
    assert (other["intermediate_size"], other["rope_theta"], other["rope_scaling"]) == (80, 500.0, scaling)
    for_vllm, for_sglang = (load_file(tmp_path / name / WEIGHTS_FILE) for name in ("one", "other"))
    assert not {"d2t", "t2d", "lm_head.weight", "embed_tokens.weight"} & for_vllm.keys()
    assert for_sglang["t2d"].all()
    assert not for_sglang["d2t"].any()
    assert torch.equal(for_sglang["lm_head.weight"], written.model.get_output_embeddings().weight)
    assert "midlayer.hidden_norm.weight" in for_sglang
    said = (tmp_path / "other" / SERVE_FILE).read_text()
    assert "Format-checked only" in said
    assert "SGLang 0.5.12" in said  # the first that knows the norms


OWN_CODE = """from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_target_with_code_of_its_own_is_read_and_served_where_that_may_run(write, engine, tmp_path):
    written = write(EAGLE)
    folder = shutil.copytree(written.target_folder, tmp_path / "own")
    (folder / "own.py").write_text(OWN_CODE)
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnLM"}
    (folder / "config.json").write_text(json.dumps(config_of(folder) | {"model_type": "own", "auto_map": classes}))
    refused, trusted = (
        replace(written.source(), target=TargetFolder(folder, TARGET, trust_remote_code=trust)) for trust in (False, True)
    )
    with pytest.raises(InputError, match="holds no config of a causal LM"):
        export(refused, engine, written.out)
    export(trusted, engine, written.out)
    assert "--trust-remote-code" in shlex.split((written.out / SERVE_FILE).read_text().splitlines()[2])


def test_a_mtp_head_beside_a_llama_takes_mimos_names_order_and_biases(write):
    written = write(MTP)
    export(written.source(), "vllm", written.out)
    tensors, own = load_file(written.out / WEIGHTS_FILE), written.head.state_dict()["layers.0.eh_proj.weight"]
    width = own.shape[0]
    projection = tensors["model.mtp_layers.0.input_proj.weight"]
    assert torch.equal(projection[:, :width], own[:, width:])  # theirs reads the state first, ours the embedding
    assert torch.equal(projection[:, width:], own[:, :width])
    assert not tensors["model.mtp_layers.0.self_attn.k_proj.bias"].any()
    assert "num_nextn_predict_layers" in (written.out / SERVE_FILE).read_text()


@pytest.mark.parametrize("own_output_heads", [False, True])
def test_medusa_is_widened_by_rows_that_never_win(write, own_output_heads):
    settings = MedusaSettings(kind="medusa", num_depths=3, train_head=own_output_heads, own_output_heads=own_output_heads)
    written = write(settings, vocabulary=checks.SOME_TOKENS)
    export(written.source(), "vllm", written.out)
    tensors, own, ids_W = load_file(written.out / WEIGHTS_FILE), written.head.state_dict(), checks.SOME_TOKENS.token_ids_W
    heads = [name for name in own if name.startswith("lm_head")]
    assert config_of(written.out)["original_lm_head"] is not own_output_heads
    assert len(heads) == (3 if own_output_heads else 1)
    for name in heads:
        assert torch.equal(tensors[name][ids_W], own[name])
        states_ND = torch.randn(200, own[name].shape[1], generator=torch.Generator().manual_seed(1))
        assert torch.equal((states_ND @ tensors[name].T).argmax(1), ids_W[(states_ND @ own[name].T).argmax(1)])


@pytest.mark.parametrize(
    ("settings", "options", "engine", "words"),
    [
        (EAGLE, {}, "transformers", "transformers has no form for eagle3; eagle3 goes to vllm"),
        (EAGLE, {"norm_before_residual": True}, "sglang", "head.norm_before_residual"),
        (EAGLE, {"num_layers": 2}, "sglang", "head.num_layers"),
        (EAGLE, {"taps": [0, 1, 2]}, "sglang", "reads h_0"),
        (EAGLE, {"norm_taps": False, "norm_joined_taps": True}, "sglang", "head.norm_joined_taps"),
        (EAGLE, {"own_embedding": True}, "sglang", "head.own_embedding"),
        (EAGLE, {"qk_norm": True}, "sglang", "head.qk_norm"),
        (DFLASH, {"taps": [2, 4]}, "transformers", "h_4, the last block's state"),
        (MTP, {"reads": "pre_norm"}, "vllm", "head.reads"),
        (MTP, {"train_head": True}, "vllm", "head.train_head"),
        (DFLASH, {"train_head": True}, "sglang", "head.train_head"),
        (HydraSettings(kind="hydra"), {}, "vllm", "hydra goes to no engine yet"),
        (EAGLE, {}, "vllm", "Gemma3TextScaledWordEmbedding"),
        (EAGLE, checks.NO_NORMS | {"norm_feedback": True}, "gguf", "head.norm_feedback"),
        (EAGLE, checks.NO_NORMS | {"norm_taps": True}, "openvino", "head.norm_taps"),
        (EAGLE, checks.NO_NORMS | {"taps": [1, 3]}, "gguf", "head.taps"),
        (EAGLE, checks.NO_NORMS | {"qk_norm": True}, "gguf", "head.qk_norm"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_an_engine_cannot_hold_is_refused(write, settings, options, engine, words):
    written = write(settings.model_copy(update=options), "gemma3" if "Embedding" in words else "llama")
    with pytest.raises(InputError, match=words):
        export(written.source(), engine, written.out)
    assert not written.out.exists()


def test_a_damaged_artifact_is_refused(write):
    written = write(EAGLE)
    weights = load_file(written.artifact / WEIGHTS_FILE)
    del weights["norm.weight"]
    save_file(weights, written.artifact / WEIGHTS_FILE)
    with pytest.raises(InputError, match=r"lacks norm\.weight"):
        export(written.source(), "vllm", written.out)


def test_another_target_is_refused_and_can_be_allowed(write):
    written = write(EAGLE)
    path = written.artifact / METADATA_FILE
    metadata = json.loads(path.read_text())
    metadata["target"]["weights_sha256"] = "1" * 64
    path.write_text(json.dumps(metadata))
    with pytest.raises(InputError, match="are others"):
        export(written.source(), "vllm", written.out)
    export(written.source(), "vllm", written.out, allow_target_mismatch=True)


def test_a_quantised_target_lends_its_head_as_it_is_run(write, tmp_path):
    written = write(EAGLE)
    written.target_folder = shutil.copytree(written.target_folder, tmp_path / "quantised")
    settings = {"quant_method": "fp8", "weight_block_size": [24, 24]}
    meant = quantise(written.target_folder, Scheme(settings, fp8(".weight_scale_inv", 24, 24), which=("_proj", "lm_head")))
    export(written.source(dtype=torch.bfloat16), "sglang", tmp_path / "sglang", allow_target_mismatch=True)
    head = load_file(tmp_path / "sglang" / WEIGHTS_FILE)["lm_head.weight"]
    assert torch.equal(head, meant["lm_head.weight"].float().bfloat16())
    assert "quantization_config" not in config_of(tmp_path / "sglang")


def test_a_path_that_vllm_would_misread_is_refused(write, tmp_path):
    written = write(MedusaSettings(kind="medusa"))
    with pytest.raises(InputError, match="'eagle-'"):
        export(written.source(), "vllm", tmp_path / "not-eagle-at-all")


# --- the lines of serve.txt: flags, methods and keys as their engines read them ------------------------------------------

VLLM_METHODS = {"draft_lm": "draft_model", "peagle": "eagle3", "dflash2": "dflash"}  # the others bear the family's name
SGLANG_ALGORITHMS = {"draft_lm": "STANDALONE", "eagle3": "EAGLE3", "dflash": "DFLASH", "domino": "DFLASH"}
TARGET = "a target's name"


@pytest.fixture
def serve_lines(write, tiny_run, tmp_path):
    """A function that exports a draft of a kind; gives the lines that serve it, its folder and its number of drafts."""

    def make(engine, kind):
        out = tmp_path / 'it\'s {served} "well" $HOME'  # to be quoted
        if kind == "draft_lm":
            source = read_source(tiny_run / "artifact", TargetFolder(tiny_run / "target", TARGET))
        else:
            written = write(checks.SETTINGS[kind])
            source = replace(written.source(), target=TargetFolder(written.target_folder, TARGET))
        export(source, engine, out)
        lines = (out / SERVE_FILE).read_text().partition("\n\n")[2].splitlines()
        return "\n".join(line for line in lines if not line.startswith("- ")).strip(), str(out), source.num_speculative_tokens

    return make


@pytest.mark.parametrize("kind", FORMS["vllm"])
def test_vllm(serve_lines, kind):
    line, out, tokens = serve_lines("vllm", kind)
    config = {"method": VLLM_METHODS.get(kind, kind), "model": out, "num_speculative_tokens": tokens}
    config |= {"parallel_drafting": True} if kind == "peagle" else {}
    options = ["--hf-overrides", '{"num_nextn_predict_layers": 1}'] if kind == "mtp" else []
    assert shlex.split(line) == ["vllm", "serve", TARGET, *options, "--speculative-config", json.dumps(config)]


def test_vllm_keeps_the_cache_of_a_head_with_a_window_apart_from_the_targets(write):
    written = write(Eagle3Settings(kind="eagle3", taps=[1, 2, 3], num_depths=3, window=8))
    assert "--disable-hybrid-kv-cache-manager" in export(written.source(), "vllm", written.out).serve("folder")


@pytest.mark.parametrize(
    ("kinds", "flags"),
    [
        (["full_attention"], set()),
        (["sliding_attention", "full_attention"], {"--disable-hybrid-kv-cache-manager"}),
        (["linear_attention", "full_attention"], set()),
    ],
)
def test_vllm_keeps_the_caches_of_a_draft_lm_and_of_a_target_of_several_kinds_of_layers_apart(tiny_run, kinds, flags):
    target = TargetFolder(tiny_run / "target", TARGET)
    target.model.config.layer_types = kinds
    words = shlex.split(FORMS["vllm"]["draft_lm"](read_source(tiny_run / "artifact", target)).serve("folder"))
    assert set(words[3 : words.index("--speculative-config")]) == flags


@pytest.mark.parametrize("kind", FORMS["sglang"])
def test_sglang(serve_lines, kind):
    line, out, tokens = serve_lines("sglang", kind)
    words = ["python", "-m", "sglang.launch_server", "--model-path", TARGET, "--speculative-algorithm", SGLANG_ALGORITHMS[kind]]
    words += ["--speculative-draft-model-path", out]
    if kind not in ("dflash", "domino"):  # a block has its own length; the last number has the pending token in it
        words += ["--speculative-num-steps", str(tokens), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(tokens + 1)]
    assert shlex.split(line) == words


@pytest.mark.parametrize(
    ("kind", "options"), [("draft_lm", {"assistant_model"}), ("dflash", {"assistant_model", "speculation_type", "do_sample"})]
)
def test_transformers(serve_lines, kind, options):
    lines, out, _ = serve_lines("transformers", kind)
    calls = [node for node in ast.walk(ast.parse(lines)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    (generate,) = [call for call in calls if call.func.attr == "generate"]
    assert {keyword.arg for keyword in generate.keywords} - {None} == options
    loads = [call.args[0].value for call in calls if call.func.attr == "from_pretrained"]
    assert loads == [TARGET, out]
