"""What cannot be decoded is refused at the start with the reason; what goes wrong under way costs its own request only."""

from dataclasses import replace

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig, DynamicTree, StaticTree
from eval.decoder.decode import decode
from heads.artifact import load_draft, save_draft_lm
from heads.metadata import read_metadata
from heads.proposers.draft_lm import DraftLM
from tests.support.decoding import requests_for

HEALTHY, BROKEN, MARK = [[7, 12, 3], [20, 9], [31, 5, 6], [13, 11], [50, 2], [8]], [40, 5], 40
SHAPES = {
    "greedy chain": {},
    "sampled chain": {"temperature": 1.0},
    "greedy tree": {"tree": StaticTree(kind="static", branching=[3, 2, 1])},
    "grown tree": {"tree": DynamicTree(kind="dynamic", num_nodes=9, width=3)},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("whose", ["target", "draft"])
def test_what_is_no_number_ends_its_own_request_and_no_other(shape, whose, tiny_llama, as_target):
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=8, **SHAPES[shape])
    models = {"target": tiny_llama(seed=1), "draft": tiny_llama(seed=2)}
    target, draft = as_target(models["target"]), DraftLM(models["draft"], 64)
    unbroken, _ = decode(target, requests_for([*HEALTHY, BROKEN]), config.model_copy(update={"num_speculative_tokens": 0}))
    with torch.no_grad():
        models[whose].get_input_embeddings().weight[MARK] = float("nan")
    mixed, _ = decode(target, requests_for([*HEALTHY, BROKEN]), config, draft)
    # The others may come upon the same token by themselves; then they end as they would alone.
    again, _ = decode(target, requests_for(HEALTHY), config, draft)
    assert [each.tokens for each in mixed[:-1]] == [each.tokens for each in again]
    assert any(each.stop_reason == "length" for each in again)
    drawn_from_the_draft = shape == "sampled chain"
    if whose == "target" or drawn_from_the_draft:
        assert mixed[-1].stop_reason == "non_finite"
    else:  # drafts that are not drawn from a distribution cost nothing but time
        assert mixed[-1].stop_reason == "length"
        assert mixed[-1].tokens == unbroken[-1].tokens


def test_a_draft_that_lacks_tokens_it_claims_to_say_is_refused(tiny_run, tiny_llama, tiny_tokenizer, tmp_path, as_target):
    metadata = read_metadata(tiny_run / "artifact")
    save_draft_lm(tmp_path / "artifact", tiny_llama(vocab_size=50, dtype=torch.float32), tiny_tokenizer, metadata)
    target = as_target(tiny_llama(seed=1, dtype=torch.float32))
    identity = {key: value for key, value in metadata.target.items() if key.endswith("sha256")}
    with pytest.raises(InputError, match=r"its model has 50 tokens, while draftsmith\.json says 64"):
        load_draft(tmp_path / "artifact", replace(target.identity, **identity), target.model)
