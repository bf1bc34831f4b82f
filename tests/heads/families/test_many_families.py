"""Heads are made for targets of any family: they train two steps, are written as artifacts and draft the same when loaded."""

from itertools import cycle

import pytest
import torch

from configs.runtime.errors import InputError
from configs.schema.training import LossConfig
from distill.loss.head_objective import HeadObjective
from heads.artifact import load_draft
from heads.families.registry import FAMILIES, serve
from tests.support import family_checks as checks
from tests.support.artifacts import save_artifact
from tests.support.family_configs import HYBRIDS, STATELESS, VOCAB_SIZE, tiny_model

ROWS = torch.randint(3, VOCAB_SIZE, (2, 24), generator=torch.Generator().manual_seed(1)).tolist()
OTHERS = ("medusa", "hydra", "peagle", "dflash", "dspark", "dflash2", "xpress", "domino", "early_exit")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("eagle3", name) for name in (*STATELESS, *HYBRIDS)),
        *zip(OTHERS, cycle(("gpt2", "jamba", "mamba2"))),
        ("hydra", "gemma4_text"),
        *(
            ("mtp", name)
            for name in ("qwen3_next", "granitemoehybrid", "nemotron_h", "jamba", "lfm2", "lfm2_moe", "falcon", "deepseek_v32")
        ),
    ],
)
def test_a_head_trains_and_comes_back(kind, name, as_target, tmp_path):
    target = as_target(tiny_model(name))
    head = FAMILIES[kind].build(checks.SETTINGS[kind], target.model, None).train()
    batch, states = checks.inputs_of(target.model, ROWS, head.taps)
    objective = HeadObjective(head, target, LossConfig())
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        (objective(batch, states).loss / batch.loss_mask_BT.sum()).backward()
        assert all(bool(parameter.grad.isfinite().all()) for parameter in head.parameters() if parameter.requires_grad)
        optimizer.step()
    save_artifact(tmp_path / "artifact", head, target.identity.to_dict(), vocab_size=VOCAB_SIZE)
    loaded = load_draft(tmp_path / "artifact", target.identity, target.model)
    proposer = FAMILIES[kind].propose(serve(head, target.model), target.device)
    for drafted, again in zip(checks.first_drafts(target, proposer), checks.first_drafts(target, loaded.proposer), strict=True):
        torch.testing.assert_close(drafted, again, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "width"), [("gpt2", 256), ("gpt_bigcode", 256), ("gptj", 256), ("opt", 96), ("falcon", 96), ("mpt", 256)]
)
def test_the_width_of_an_mlp_is_its_modules_where_the_config_has_no_such_key(name, width):
    head = FAMILIES["eagle3"].build(checks.SETTINGS["eagle3"], tiny_model(name), None)
    assert head.layers[0].mlp.up_proj.out_features == width


def test_an_mtp_module_is_made_where_norms_have_no_weights_and_refused_where_a_block_does_not_run_alone():
    mtp = checks.SETTINGS["mtp"]
    assert not list(FAMILIES["mtp"].build(mtp, tiny_model("olmo"), None).layers[0].enorm.parameters())
    with pytest.raises(InputError, match=r"block 3 of Mamba2ForCausalLM is of type linear_attention; .* eagle3"):
        FAMILIES["mtp"].build(mtp, tiny_model("mamba2"), None)
    with pytest.raises(InputError, match=r"block 3 of MptForCausalLM needs more around it .* take another head.kind"):
        FAMILIES["mtp"].build(mtp, tiny_model("mpt"), None)
    with pytest.raises(InputError, match=r"reads states of width 256, and the model's are of 64.* another head.kind"):
        FAMILIES["mtp"].build(mtp, tiny_model("qwen4_exp_text"), None)
    with pytest.raises(InputError, match=r"block 0 of Llama4ForCausalLM is of type chunked_attention"):
        FAMILIES["mtp"].build(mtp.model_copy(update={"init_block": 0}), tiny_model("llama4_text"), None)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle3"])
def test_a_target_of_several_widths_is_refused(kind):
    with pytest.raises(InputError, match="OPTForCausalLM has states of width 64 and an embedding or output head of width 32"):
        FAMILIES[kind].build(checks.SETTINGS[kind], tiny_model("opt, narrow embedding"), None)
