"""MTP for vLLM where the target's checkpoint has places for it: a copy of the target, linked where nothing changes."""

import json

import pytest
import torch
from safetensors.torch import load_file

from configs.runtime.errors import InputError
from configs.schema.heads import MtpSettings
from heads.formats.exporting.exporter import SERVE_FILE, export
from heads.formats.importing.importer import fit
from heads.formats.importing.reading import read_external
from heads.frozen.identity import hash_weights
from heads.metadata import METADATA_FILE
from tests.support import mtp_checkpoints as native
from tests.support.quantized_checkpoints import Scheme, fp8_blocks, quantise

ONE = MtpSettings(kind="mtp", num_depths=2)


@pytest.fixture
def write_beside_modules(write, tmp_path):
    """A function that writes a head for a target whose folder holds MTP modules under a naming."""

    def make(settings, naming, **options):
        written = write(settings, "qwen3")
        written.target_folder = tmp_path / "target"
        native.write_modules(written.target_folder, written.model, naming, **options)
        path = written.artifact / METADATA_FILE
        metadata = json.loads(path.read_text())
        metadata["target"]["weights_sha256"] = hash_weights(written.target_folder)
        path.write_text(json.dumps(metadata))
        return written

    return make


@pytest.mark.parametrize("order", ["embedding_first", "hidden_first"])
@pytest.mark.parametrize("naming", ["qwen3_next", "deepseek"])
def test_a_head_goes_into_the_target_and_comes_back(write_beside_modules, naming, order):
    written = write_beside_modules(ONE.model_copy(update={"concat_order": order}), naming)
    before = load_file(written.target_folder / "model.safetensors")
    export(written.source(), "vllm", written.out)
    after = load_file(written.out / "model.safetensors")
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == set(native.module_tensors(naming, written.model)[0])
    fitted = fit(read_external(written.out), written.model)
    own = written.head.state_dict()
    if order == "hidden_first":
        own["layers.0.eh_proj.weight"] = own["layers.0.eh_proj.weight"].roll(32, 1)
    assert all(torch.equal(stored, own[name]) for name, stored in fitted.weights.items())
    serve = (written.out / SERVE_FILE).read_text()
    assert f"vllm serve {written.out.resolve()} --speculative-config" in serve
    assert '{"method": "mtp", "num_speculative_tokens": 3}' in serve


@pytest.mark.parametrize("left_out", ["mtp", "nothing"])
def test_unquantised_modules_of_a_quantised_target_are_replaced_and_quantised_ones_refused(write_beside_modules, left_out):
    written = write_beside_modules(ONE, "qwen3_next")
    fp8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    quantise(written.target_folder, Scheme(fp8, fp8_blocks(".weight_scale_inv", 16), left_out=(left_out,)))
    before = load_file(written.target_folder / "model.safetensors")
    if left_out == "nothing":
        with pytest.raises(
            InputError, match=r"weight_scale_inv.*it is quantised, and MTP modules are read and written unquant"
        ):
            export(written.source(), "vllm", written.out, allow_target_mismatch=True)
        return
    export(written.source(), "vllm", written.out, allow_target_mismatch=True)
    after = load_file(written.out / "model.safetensors")
    assert {name: value.dtype for name, value in after.items()} == {name: value.dtype for name, value in before.items()}
    changed = {name for name, value in before.items() if not torch.equal(value.float(), after[name].float())}
    assert changed == set(native.module_tensors("qwen3_next", written.model)[0])


def test_files_without_modules_are_links_and_the_targets_stay_as_they_are(write_beside_modules):
    written = write_beside_modules(ONE, "qwen3_next", shards=6)
    before = {path.name: path.read_bytes() for path in written.target_folder.iterdir()}
    index = json.loads((written.target_folder / "model.safetensors.index.json").read_text())["weight_map"]
    with_modules = {file for name, file in index.items() if name.startswith("mtp.")}
    export(written.source(), "vllm", written.out)
    assert {path.name: path.read_bytes() for path in written.target_folder.iterdir()} == before
    linked = {path.name for path in written.out.iterdir() if path.stat().st_nlink > 1}
    assert linked == before.keys() - with_modules
    assert all((written.out / name).read_bytes() != before[name] for name in with_modules)


@pytest.mark.parametrize(
    ("settings", "naming", "modules", "words"),
    [
        (ONE, "mimo", 1, "gives modules of MiMo the one pre_norm"),
        (ONE.model_copy(update={"reads": "pre_norm"}), "deepseek", 1, "the one post_norm"),
        (ONE, "transformers", 1, "names that transformers alone reads"),
        (ONE, "deepseek", 2, "has 1 MTP modules, and .* has places for 2"),
        (ONE.model_copy(update={"shared_depths": False}), "deepseek", 2, "applies the first MTP module at every depth"),
    ],
)
def test_what_vllm_would_run_otherwise_is_refused(write_beside_modules, settings, naming, modules, words):
    written = write_beside_modules(settings, naming, modules=modules)
    source = written.source(num_speculative_tokens=2)
    with pytest.raises(InputError, match=words):
        export(source, "vllm", written.out)
    assert not written.out.exists()


def test_a_hybrid_target_is_served_without_prefix_caching(write_beside_modules, monkeypatch):
    written = write_beside_modules(ONE, "qwen3_next")
    source = written.source()
    monkeypatch.setattr(source.target.config, "model_type", "qwen3_next")
    assert "--no-enable-prefix-caching" in export(source, "vllm", written.out).serve("there")
