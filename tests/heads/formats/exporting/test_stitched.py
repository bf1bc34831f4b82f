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
from heads.frozen.weights import INDEX_FILE
from heads.metadata import METADATA_FILE
from tests.support import mtp_checkpoints as native
from tests.support.quantized_checkpoints import Scheme, fp8, quantise

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


@pytest.mark.parametrize("naming", ["qwen3_next", "deepseek"])
def test_a_head_goes_into_the_target_and_comes_back(write_beside_modules, naming):
    written = write_beside_modules(ONE, naming)
    before = load_file(written.target_folder / "model.safetensors")
    export(written.source(), "vllm", written.out)
    after = load_file(written.out / "model.safetensors")
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == set(native.module_tensors(naming, written.model)[0])
    fitted = fit(read_external(written.out), written.model)
    own = written.head.state_dict()
    assert all(torch.equal(stored, own[name]) for name, stored in fitted.weights.items())
    serve = (written.out / SERVE_FILE).read_text()
    assert f"vllm serve {written.out.resolve()} --speculative-config" in serve
    assert '{"method": "mtp", "num_speculative_tokens": 3}' in serve


@pytest.mark.parametrize("left_out", ["mtp", "nothing"])
def test_unquantised_modules_of_a_quantised_target_are_replaced_and_quantised_ones_refused(write_beside_modules, left_out):
    written = write_beside_modules(ONE, "qwen3_next")
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    quantise(written.target_folder, Scheme(settings, fp8(".weight_scale_inv", 16, 16), left_out=(left_out,)))
    before = load_file(written.target_folder / "model.safetensors")
    if left_out == "nothing":
        with pytest.raises(InputError, match="weight_scale_inv"):
            export(written.source(), "vllm", written.out, allow_target_mismatch=True)
        return
    export(written.source(), "vllm", written.out, allow_target_mismatch=True)
    after = load_file(written.out / "model.safetensors")
    assert {name: value.dtype for name, value in after.items()} == {name: value.dtype for name, value in before.items()}
    changed = {name for name, value in before.items() if not torch.equal(value.float(), after[name].float())}
    assert changed == set(native.module_tensors("qwen3_next", written.model)[0])


def test_files_without_modules_are_links_and_in_the_others_modules_alone_are_new(write_beside_modules):
    copies = {f"model.layers.{native.BLOCKS}.embed_tokens.weight": torch.randn(4, 4)}
    written = write_beside_modules(ONE, "deepseek", shards=6, dtype=torch.bfloat16, changes=copies)
    before = {path.name: path.read_bytes() for path in written.target_folder.iterdir()}
    index = json.loads((written.target_folder / INDEX_FILE).read_text())["weight_map"]
    modules = native.module_tensors("deepseek", written.model)[0]
    with_modules = {index[name] for name in modules}
    export(written.source(), "vllm", written.out)
    assert {path.name: path.read_bytes() for path in written.target_folder.iterdir()} == before
    assert {path.name for path in written.out.iterdir() if path.stat().st_nlink > 1} == before.keys() - with_modules
    for file in with_modules:
        old, new = load_file(written.target_folder / file), load_file(written.out / file)
        assert {name: value.dtype for name, value in new.items()} == {name: value.dtype for name, value in old.items()}
        assert {name for name in old if not torch.equal(old[name], new[name])} == modules.keys() & old.keys()
    norm = f"model.layers.{native.BLOCKS}.hnorm.weight"
    assert torch.equal(
        load_file(written.out / index[norm])[norm], written.head.state_dict()["layers.0.hnorm.weight"].bfloat16()
    )


@pytest.mark.parametrize(("settings", "naming"), [(ONE, "mimo"), (ONE.model_copy(update={"reads": "pre_norm"}), "deepseek")])
def test_what_vllm_would_run_otherwise_is_refused(write_beside_modules, settings, naming):
    written = write_beside_modules(settings, naming)
    with pytest.raises(InputError, match=r"head\.reads"):
        export(written.source(), "vllm", written.out)
    assert not written.out.exists()


def test_a_hybrid_target_is_served_without_prefix_caching(write_beside_modules, monkeypatch):
    written = write_beside_modules(ONE, "qwen3_next")
    source = written.source()
    monkeypatch.setattr(source.target.config, "model_type", "qwen3_next")
    assert "--no-enable-prefix-caching" in export(source, "vllm", written.out).serve("there")
