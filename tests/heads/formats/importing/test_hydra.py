"""Published Hydra heads come in with their weights in place; those that do something else are refused."""

import json

import pytest
import torch
from safetensors.torch import load_file

from configs.runtime.errors import InputError
from configs.schema.heads import HydraSettings
from heads.formats.importing.importer import fit, write_artifact
from heads.formats.importing.reading import read_external
from heads.metadata import WEIGHTS_FILE
from tests.support import family_checks as checks

PLAIN = HydraSettings(kind="hydra", num_depths=3, num_layers=2, **checks.OWN_HEADS)
PREFIX = checks.SETTINGS["hydra, published"]
CONFIG = {"hydra_num_heads": 3, "hydra_num_layers": 3, "hydra_head_arch": "mlp", "grounded_heads": True}


def published_name(name, *, dropout):
    """Return the name that the published code gives a tensor; with dropout, each block stands behind one."""
    stem, leaf = name.rsplit(".", 1)
    parts = stem.split(".")
    place = (lambda number: 2 * number + 1) if dropout else (lambda number: number)
    if parts[0] == "blocks" and parts[2] == "blocks":
        return f"hydra_mlp.{parts[1]}.{place(int(parts[4]) + 1)}.linear.{leaf}"
    if parts[0] == "blocks":
        return f"hydra_mlp.{parts[1]}.{place(0)}.{parts[2]}.{leaf}"
    if parts[0] == "lm_heads":
        return f"hydra_lm_head.{parts[1]}.{'1.' if dropout else ''}{leaf}"
    return name.replace("prefix_layer.", "prefix_embeding_layer.layers.0.").replace(
        "prefix_norm.", "prefix_embeding_layer.norm."
    )


@pytest.fixture
def publish(write):
    """A function that writes a Hydra head as it would be published; gives what `write` gives."""

    def make(settings, config, *, dropout, drop=(), **more):
        written = write(settings)
        own = load_file(written.artifact / WEIGHTS_FILE)
        theirs = {published_name(name, dropout=dropout): value for name, value in own.items() if name not in drop}
        written.out.mkdir()
        torch.save(theirs | more, written.out / "hydra_lm_head.pt")
        (written.out / "config.json").write_text(json.dumps(config))
        return written

    return make


MORE = {"prefix_embeding_layer.embed_tokens.weight": torch.ones(64, 32)}  # never read


@pytest.mark.parametrize(
    ("settings", "config", "dropout", "more"),
    [(PLAIN, CONFIG, False, {}), (PREFIX, CONFIG | {"hydra_head_arch": "prefix-mlp"}, True, MORE)],
    ids=["plain", "prefix"],
)
def test_published_heads_come_in(publish, tmp_path, settings, config, dropout, more):
    written = publish(settings, config, dropout=dropout, **more)
    fitted = fit(read_external(written.out), written.model)
    write_artifact(fitted, tmp_path / "back", written.target.identity, vocab_size=64, num_speculative_tokens=3, provenance={})
    own, back = load_file(written.artifact / WEIGHTS_FILE), load_file(tmp_path / "back" / WEIGHTS_FILE)
    assert own.keys() == back.keys()
    assert all(torch.equal(own[name], back[name]) for name in own)
    assert fitted.settings == written.head.settings


@torch.no_grad()
def test_a_head_of_one_block_gets_one_that_does_nothing(publish):
    later = [f"blocks.{head}.blocks.layers.0.{leaf}" for head in range(3) for leaf in ("weight", "bias")]
    settings = PLAIN.model_copy(update={"num_layers": 1})
    written = publish(settings, CONFIG | {"hydra_num_layers": 1}, dropout=False, drop=later)
    fitted = fit(read_external(written.out), written.model)
    for name in later:
        written.head.state_dict()[name].zero_()
    batch, states = checks.inputs_of(written.model, checks.PROMPTS, ())
    expected = [depth.hidden_ND for depth in written.head(batch, states)]
    head = checks.build(fitted.settings, written.model)
    head.load_state_dict({name: stored.load() for name, stored in fitted.weights.items()})
    for depth, hidden_ND in zip(head(batch, states), expected, strict=True):
        torch.testing.assert_close(depth.hidden_ND, hidden_ND)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hydra_head_arch": "cross-attn"}, "of the kind 'cross-attn'"),
        ({"grounded_heads": False}, "do not read the tokens drafted before"),
        ({"hidden_state_offset": 1}, "the state of 1 positions before"),
        ({"hydra_num_layers": 2}, "holds unknown blocks.0.blocks.layers.1.bias"),
        ({"hydra_num_heads": 2}, "holds unknown blocks.2.blocks.layers.0.bias"),
    ],
)
def test_other_heads_are_refused(publish, config, words):
    written = publish(PLAIN, CONFIG | config, dropout=False)
    with pytest.raises(InputError, match=words):
        fit(read_external(written.out), written.model)


def test_an_embedding_of_its_own_is_refused(publish):
    written = publish(PLAIN, CONFIG, dropout=False, **{"input_embed_fn.weight": torch.ones(64, 32)})
    with pytest.raises(InputError, match="is not the target's embedding"):
        fit(read_external(written.out), written.model)
