"""Targets whose checkpoints hold MTP modules, under every naming that is read."""

import math

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from heads.frozen.weights import SINGLE_FILE
from tests.support import family_checks as checks

WIDTH, BLOCKS = checks.SMALL["hidden_size"], checks.SMALL["num_hidden_layers"]
# By naming: the names of norm of embedding, norm of state, projection, last norm and block, after what they begin with.
SPELLINGS = {
    "qwen3_next": ("mtp", (".pre_fc_norm_embedding", ".pre_fc_norm_hidden", ".fc", ".norm", ".layers.0")),
    "mimo": ("model.mtp_layers.{k}", (".token_layernorm", ".hidden_layernorm", ".input_proj", ".final_layernorm", "")),
    "deepseek": ("model.layers.{n}", (".enorm", ".hnorm", ".eh_proj", ".shared_head.norm", "")),
}


def module_tensors(naming, model, number=0, dtype=torch.float32):
    """Return the random tensors of a module as a checkpoint names them, and as a head that reads the embedding first does."""
    stem, parts = SPELLINGS[naming]
    *names, block_name = [stem.format(k=number, n=BLOCKS + number) + part for part in parts]
    generator = torch.Generator().manual_seed(number)
    block = model.model.layers[-1].state_dict()
    theirs = [f"{name}.weight" for name in names] + [f"{block_name}.{name}" for name in block]
    ours = [f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "post_norm")] + [f"mtp_block.{name}" for name in block]
    shapes = [[WIDTH], [WIDTH], [WIDTH, 2 * WIDTH], [WIDTH], *(list(value.shape) for value in block.values())]
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    named = {f"layers.{number}.{name}": value for name, value in zip(ours, values, strict=True)}
    if naming == "mimo":  # which reads the state first
        named[f"layers.{number}.eh_proj.weight"] = values[2].roll(WIDTH, 1)
    return dict(zip(theirs, values, strict=True)), named


def write_checkpoint(folder, model, extra, *, shards=1):
    """Write a model and further tensors, in one file or in several with an index."""
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    tensors = load_file(folder / SINGLE_FILE) | extra
    (folder / SINGLE_FILE).unlink()
    size = sum(value.nbytes for value in tensors.values())
    save_torch_state_dict(tensors, folder, max_shard_size=math.ceil(size / shards))


def write_modules(folder, model, naming, *, modules=1, shards=1, dtype=torch.float32, changes=None):
    """Write a model with MTP modules, of which some tensors are others or (None) missing; return them as a head names them."""
    theirs, ours = dict(changes or {}), {}
    for number in range(modules):
        more, named = module_tensors(naming, model, number, dtype)
        theirs, ours = more | theirs, ours | named
    write_checkpoint(folder, model, {name: value for name, value in theirs.items() if value is not None}, shards=shards)
    return ours


def write_experts(folder):
    """Write a model with a module whose block is the last one over again, as files keep it: expert by expert; return it."""
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
    model.save_pretrained(folder)
    tensors = load_file(folder / SINGLE_FILE)
    block = {key.replace(".1.", ".2.", 1): value.clone() for key, value in tensors.items() if key.startswith("model.layers.1.")}
    assert "model.layers.2.mlp.experts.3.up_proj.weight" in block
    parts = {"enorm": [WIDTH], "hnorm": [WIDTH], "eh_proj": [WIDTH, 2 * WIDTH], "shared_head.norm": [WIDTH]}
    block |= {f"model.layers.2.{name}.weight": torch.randn(shape) for name, shape in parts.items()}
    save_file(tensors | block, folder / SINGLE_FILE)
    return model
