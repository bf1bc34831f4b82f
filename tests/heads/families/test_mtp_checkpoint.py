"""A checkpoint's own MTP weights: read under every known naming, put back so that nothing else changes, refused in words."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

from configs.runtime.errors import InputError
from configs.schema.heads import MtpSettings
from heads.families.mtp import Mtp
from heads.families.mtp_checkpoint import NativeMtp
from heads.families.registry import FAMILIES
from heads.target.checkpoint_files import INDEX_FILE, SINGLE_FILE
from tests.support import family_checks as checks

WIDTH = checks.SMALL["hidden_size"]
BLOCKS = checks.SMALL["num_hidden_layers"]
ONE = MtpSettings(kind="mtp", init="checkpoint")
TWO = MtpSettings(kind="mtp", init="checkpoint", num_depths=2, shared_depths=False)
# By naming: the names of norm of embedding, norm of state, projection, last norm, block; whether the state comes first.
SPELLINGS = {
    "qwen3_next": (
        ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0"),
        False,
    ),
    "mimo": (
        tuple(
            f"model.mtp_layers.{{k}}{part}"
            for part in (".token_layernorm", ".hidden_layernorm", ".input_proj", ".final_layernorm", "")
        ),
        True,
    ),
    "deepseek": (
        tuple(f"model.layers.{{n}}{part}" for part in (".enorm", ".hnorm", ".eh_proj", ".shared_head.norm", "")),
        False,
    ),
    "transformers": (tuple(f"mtp.layers.{{k}}{part}" for part in (".enorm", ".hnorm", ".eh_proj", ".post_norm", "")), False),
}
NAMINGS = pytest.mark.parametrize("naming", SPELLINGS)


def module_tensors(naming, model, number, dtype):
    """Return the random tensors of a module as a checkpoint names them, and as a head that reads the embedding first does."""
    spelled, hidden_first = SPELLINGS[naming]
    names = [name.format(k=number, n=BLOCKS + number) for name in spelled]
    generator = torch.Generator().manual_seed(number)
    block = model.model.layers[-1].state_dict()
    shapes = [[WIDTH], [WIDTH], [WIDTH, 2 * WIDTH], [WIDTH], *(list(value.shape) for value in block.values())]
    theirs = [f"{name}.weight" for name in names[:4]] + [f"{names[4]}.{name}" for name in block]
    ours = [f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "post_norm")] + [f"mtp_block.{name}" for name in block]
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    named = {f"layers.{number}.{name}": value for name, value in zip(ours, values, strict=True)}
    if hidden_first:
        projection = values[2]
        named[f"layers.{number}.eh_proj.weight"] = torch.cat([projection[:, WIDTH:], projection[:, :WIDTH]], 1)
    return dict(zip(theirs, values, strict=True)), named


def write_checkpoint(folder, model, extra, *, shards=1):
    """Write a model and further tensors, in one file or in several with an index."""
    model.save_pretrained(folder)
    tensors = load_file(folder / SINGLE_FILE) | extra
    (folder / "tokenizer.json").write_text("{}")
    if shards == 1:
        save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
        return
    (folder / SINGLE_FILE).unlink()
    weight_map = {}
    for shard in range(shards):
        part = {key: tensors[key] for key in sorted(tensors)[shard::shards]}
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def checkpoint(tmp_path):
    """Return a function that writes a tiny target with MTP tensors; gives it loaded, and the tensors as a head names them."""

    def make(naming, *, modules=1, shards=1, dtype=torch.float32, extra=None):
        model = checks.tiny_target("qwen3")
        theirs, ours = {}, {}
        for number in range(modules):
            more, named = module_tensors(naming, model, number, dtype)
            theirs, ours = theirs | more, ours | named
        folder = tmp_path / "target"
        write_checkpoint(folder, model, theirs | (extra or {}), shards=shards)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False), ours

    return make


def started(settings, target):
    """Return a head as training starts it."""
    head = FAMILIES["mtp"].build(settings, target, None).float()
    FAMILIES["mtp"].start(head, target)
    return head


def layers_of(head):
    return {name: value for name, value in head.state_dict().items() if name.startswith("layers.")}


@NAMINGS
@pytest.mark.parametrize("order", ["embedding_first", "hidden_first"])
def test_a_head_starts_from_the_checkpoints_own_module(checkpoint, naming, order):
    target, ours = checkpoint(naming)
    head = started(ONE.model_copy(update={"concat_order": order}), target)
    if order == "hidden_first":
        projection = ours["layers.0.eh_proj.weight"]
        ours["layers.0.eh_proj.weight"] = torch.cat([projection[:, WIDTH:], projection[:, :WIDTH]], 1)
    assert set(layers_of(head)) == set(ours)
    for name, value in layers_of(head).items():
        torch.testing.assert_close(value, ours[name], rtol=0, atol=0)


@pytest.mark.parametrize("naming", ["mimo", "deepseek", "transformers"])
def test_modules_of_every_depth_are_read(checkpoint, naming):
    target, ours = checkpoint(naming, modules=2, shards=3)
    layers = layers_of(started(TWO, target))
    assert set(layers) == set(ours)
    assert all(torch.equal(layers[name], value) for name, value in ours.items())


def test_a_loaded_head_does_not_ask_for_the_checkpoint_again(checkpoint):
    target, _ = checkpoint("mimo")
    shutil.rmtree(target.name_or_path)
    Mtp(ONE, target, None)


def stored(folder):
    """Return every tensor of a checkpoint, and the file it lies in."""
    return {key: (value, path.name) for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}


@NAMINGS
@pytest.mark.parametrize("shards", [1, 3])
def test_stitching_replaces_the_modules_tensors_and_nothing_else(tmp_path, checkpoint, naming, shards):
    copies = {f"model.layers.{BLOCKS}.embed_tokens.weight": torch.randn(4, 4)} if naming == "deepseek" else {}
    target, ours = checkpoint(naming, shards=shards, dtype=torch.bfloat16, extra=copies)
    folder, out = tmp_path / "target", tmp_path / "stitched"
    head = started(ONE, target)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter))
    NativeMtp(folder).stitch(layers_of(head), out, hidden_first=False)
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in folder.iterdir())
    before, after = stored(folder), stored(out)
    assert {key: file for key, (_, file) in before.items()} == {key: file for key, (_, file) in after.items()}
    changed = {key for key, (value, _) in before.items() if not torch.equal(value, after[key][0])}
    assert changed == set(module_tensors(naming, target, 0, torch.bfloat16)[0])
    assert all(after[key][0].dtype == value.dtype for key, (value, _) in before.items())
    # Read back, it is what was trained, rounded once to the checkpoint's dtype.
    again = NativeMtp(out).read(layers_of(head), hidden_first=False)
    for name, value in layers_of(head).items():
        assert torch.equal(again[name], value.bfloat16())
        assert not torch.equal(again[name], ours[name])


def test_every_byte_outside_the_modules_tensors_stays(tmp_path, checkpoint):
    target, _ = checkpoint("transformers", shards=3)
    folder, out = tmp_path / "target", tmp_path / "stitched"
    head = started(ONE, target)
    only = "layers.0.hnorm.weight"
    with torch.no_grad():
        head.state_dict()[only].add_(1.0)
    NativeMtp(folder).stitch(layers_of(head), out, hidden_first=False)
    differing = 0
    for path in folder.iterdir():
        old, new = path.read_bytes(), (out / path.name).read_bytes()
        assert len(old) == len(new)
        differing += sum(one != other for one, other in zip(old, new, strict=True))
    assert 0 < differing <= 4 * WIDTH


def test_a_module_that_was_not_trained_leaves_every_byte_as_it_was(tmp_path, checkpoint):
    target, _ = checkpoint("mimo", dtype=torch.float32)
    folder, out = tmp_path / "target", tmp_path / "stitched"
    head = started(ONE, target).bfloat16()  # as an artifact for a bfloat16 target holds it
    NativeMtp(folder).stitch(layers_of(head), out, hidden_first=False)
    assert all(path.read_bytes() == (out / path.name).read_bytes() for path in folder.iterdir())


# --- experts ------------------------------------------------------------------------------------------------------


def test_experts_kept_one_by_one_are_stacked_and_put_back(tmp_path):
    config = Glm4MoeConfig(
        **checks.GROUPED | {"num_hidden_layers": 2},
        head_dim=8,
        moe_intermediate_size=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = Glm4MoeForCausalLM(config)
    folder, out = tmp_path / "target", tmp_path / "stitched"
    model.save_pretrained(folder)
    tensors = load_file(folder / SINGLE_FILE)
    # A module whose block is the last one over again, as the file spells it, and so expert by expert.
    block = {key.replace(".1.", ".2.", 1): value.clone() for key, value in tensors.items() if key.startswith("model.layers.1.")}
    assert "model.layers.2.mlp.experts.3.up_proj.weight" in block
    parts = {"enorm": [WIDTH], "hnorm": [WIDTH], "eh_proj": [WIDTH, 2 * WIDTH], "shared_head.norm": [WIDTH]}
    block |= {f"model.layers.2.{name}.weight": torch.randn(shape) for name, shape in parts.items()}
    save_file(tensors | block, folder / SINGLE_FILE)
    target = Glm4MoeForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    with torch.no_grad():
        for parameter in target.model.layers[1].parameters():
            parameter.zero_()  # so that what the head has can only come from the file
    head = started(ONE, target)
    for name, value in model.model.layers[1].state_dict().items():
        assert torch.equal(head.layers[0].mtp_block.state_dict()[name], value), name
    with torch.no_grad():
        head.layers[0].mtp_block.mlp.experts.gate_up_proj[3, 12:] += 1.0
    NativeMtp(folder).stitch(layers_of(head), out, hidden_first=False)
    before, after = load_file(folder / SINGLE_FILE), load_file(out / SINGLE_FILE)
    changed = [key for key, value in before.items() if not torch.equal(value, after[key])]
    assert changed == ["model.layers.2.mlp.experts.3.up_proj.weight"]
    torch.testing.assert_close(after[changed[0]], before[changed[0]] + 1.0)


# --- refusals -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_without_a_module_is_refused(tmp_path):
    checks.tiny_target("llama").save_pretrained(tmp_path / "target")
    with pytest.raises(InputError, match=r"holds no MTP weights .* none of its \d+ tensors looks like one"):
        NativeMtp(tmp_path / "target")


def test_an_unknown_naming_is_refused_with_the_names_found(tmp_path):
    write_checkpoint(tmp_path / "target", checks.tiny_target("llama"), {"nextn.0.mixer.weight": torch.zeros(2)})
    with pytest.raises(InputError, match=r"holds no MTP weights .* found: nextn\.0\.mixer\.weight"):
        NativeMtp(tmp_path / "target")


def test_a_missing_tensor_is_named(tmp_path):
    model = checks.tiny_target("llama")
    theirs, ours = module_tensors("mimo", model, 0, torch.float32)
    theirs.pop("model.mtp_layers.0.mlp.up_proj.weight")
    write_checkpoint(tmp_path / "target", model, theirs)
    with pytest.raises(InputError, match=r"that of MiMo, but it lacks model\.mtp_layers\.0\.mlp\.up_proj\.weight"):
        NativeMtp(tmp_path / "target").read(ours, hidden_first=False)


def test_a_tensor_without_a_place_is_named(checkpoint, tmp_path):
    scale = "mtp.layers.0.self_attn.q_proj.weight_scale_inv"
    target, _ = checkpoint("qwen3_next", extra={scale: torch.zeros(1)})
    with pytest.raises(InputError, match=r"has no place in the head for mtp\.layers\.0\.self_attn\.q_proj\.weight_scale_inv"):
        started(ONE, target)


def test_another_shape_is_named(tmp_path):
    model = checks.tiny_target("llama")
    theirs, ours = module_tensors("deepseek", model, 0, torch.float32)
    write_checkpoint(tmp_path / "target", model, theirs | {f"model.layers.{BLOCKS}.hnorm.weight": torch.zeros(7)})
    with pytest.raises(InputError, match=r"hnorm\.weight has shape \[7\], the head's layers\.0\.hnorm\.weight asks for \[32\]"):
        NativeMtp(tmp_path / "target").read(ours, hidden_first=False)


def test_another_number_of_modules_is_refused(checkpoint):
    target, _ = checkpoint("deepseek", modules=2)
    with pytest.raises(InputError, match=r"holds 2 MTP modules, the head 1"):
        started(ONE, target)


def test_a_target_from_no_folder_is_refused():
    with pytest.raises(InputError, match="was not loaded from a folder"):
        started(ONE, checks.tiny_target("llama"))


def test_an_index_that_names_an_absent_file_is_refused(checkpoint, tmp_path):
    checkpoint("mimo", shards=2)
    (tmp_path / "target" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match=r"names files that are not in the folder: model-00002-of-00002\.safetensors"):
        NativeMtp(tmp_path / "target")


@pytest.mark.parametrize("out", ["target", "target/stitched", "there"])
def test_a_folder_in_use_is_not_written_to(tmp_path, checkpoint, out):
    target, _ = checkpoint("mimo")
    (tmp_path / "there").mkdir()
    head = started(ONE, target)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match="give a new folder"):
        NativeMtp(tmp_path / "target").stitch(layers_of(head), tmp_path / out, hidden_first=False)
    assert sorted(tmp_path.rglob("*")) == before
