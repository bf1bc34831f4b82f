"""What every family has to show: drafting is the training forward, greedy output is plain output, documents are kept apart."""

from itertools import cycle

import pytest
import torch
from safetensors.torch import load_file

from configs.runtime.errors import InputError
from configs.schema.decoding import SamplingConfig
from configs.schema.heads import MtpSettings
from configs.schema.training import LossConfig
from distill.loss.objectives import HeadObjective
from heads.families.registry import FAMILIES, serve
from heads.frozen.weights import recast
from heads.metadata import WEIGHTS_FILE
from heads.proposers.protocol import RoundInputs
from heads.sampling.draws import CounterRNG
from tests.support import architectures
from tests.support import family_checks as checks
from tests.support.family_checks import SETTINGS
from tests.support.family_configs import HYBRIDS, STATELESS, VOCAB_SIZE, tiny_model

PLAIN = [name for name in SETTINGS if "," not in name]
# Norms and rotary angles are computed in float32, whatever the dtype.
TOLERANCES = {"medusa": 1e-6, "hydra": 1e-6, "mtp": 1e-4}
BUILT = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
ON_ONE_TARGET = list(zip(cycle(sorted(checks.CONFIGS)), SETTINGS, strict=False))
ON_EVERY_TARGET = [(model, name) for model in sorted(checks.CONFIGS) for name in PLAIN]


def tolerance_of(settings):
    return TOLERANCES.get(settings.kind, 1e-5)


def test_a_served_copy_of_a_block_keeps_in_float32_what_the_target_keeps_there():
    target = recast(architectures.tiny_model("deepseek_v3"), torch.bfloat16)
    head = FAMILIES["mtp"].build(MtpSettings(kind="mtp", num_depths=1), target, None).float()
    biases = {name: each.clone() for name, each in head.named_buffers() if name.endswith("e_score_correction_bias")}
    served = dict(serve(head, target).named_buffers())
    assert biases
    assert all(torch.equal(served[name], bias) for name, bias in biases.items())
    assert {each.dtype for each in served.values() if each.is_floating_point()} == {torch.float32}
    assert {each.dtype for each in head.parameters()} == {torch.bfloat16}


def test_every_family_is_among_them():
    assert list(FAMILIES) == PLAIN


@pytest.mark.parametrize(("model", "name"), sorted({*ON_EVERY_TARGET, *ON_ONE_TARGET}))
def test_the_logits_drafted_from_are_those_of_the_training_forward(model, name):
    settings, model = SETTINGS[name], checks.tiny_target(model)
    checks.assert_drafts_as_trained(checks.build(settings, model), model, tolerance=tolerance_of(settings))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_head_of_some_tokens_drafts_as_trained(name):
    settings, model = SETTINGS[name], checks.tiny_target("gemma3")
    head = checks.build(settings, model, checks.SOME_TOKENS)
    checks.assert_drafts_as_trained(head, model, tolerance=tolerance_of(settings))


@BUILT
def test_documents_of_a_row_are_apart(settings):
    model = checks.tiny_target("llama")
    checks.assert_documents_are_apart(checks.build(settings, model), model)


@pytest.mark.parametrize(("model", "name"), ON_ONE_TARGET)
def test_gradients_reach_every_parameter_and_none_of_the_target(model, name, as_target):
    settings, target = SETTINGS[name], as_target(checks.tiny_target(model))
    from_zero = settings.kind == "medusa"  # whose new layers add nothing yet
    head = checks.build(settings.model_copy(update={"train_head": True}), target.model, stir=0.0 if from_zero else 0.2)
    assert all(parameter.requires_grad for parameter in head.parameters())
    checks.assert_gradients_reach_everything(head, target)


# --- artifacts ----------------------------------------------------------------------------------------------------


def numbered(stem, count, names):
    return {f"{stem}.{number}.{name}" for number in range(count) for name in names}


def weights(*names):
    return {f"{name}.weight" for name in names}


def linear(*names):
    return weights(*names) | {f"{name}.bias" for name in names}


ATTENTION = weights(*(f"self_attn.{name}_proj" for name in "qkvo"))
MLP = weights(*(f"mlp.{name}_proj" for name in ("gate", "up", "down")))
LAYER = ATTENTION | MLP | weights("input_layernorm", "post_attention_layernorm")
GROUNDED = linear("linear", "res_connection", "blocks.layers.0")
BLOCKS = weights("fc", "hidden_norm", "norm") | numbered("layers", 2, LAYER | weights("self_attn.q_norm", "self_attn.k_norm"))
MODULE = weights("enorm", "hnorm", "eh_proj", "post_norm") | {f"mtp_block.{name}" for name in LAYER}
CONVOLUTION = ("base_kernel", "kernel_projection.weight")
REFINER = ("token_embed", "down_h", "down_g", "in_proj", "mlp_gate", "mlp_up", "mlp_down", "readout")
EAGLE = weights("fc", "norm", "layers.0.hidden_norm")
# Engines and earlier artifacts know the tensors by these names.
NAMES = {
    "medusa": numbered("blocks", 3, linear("layers.0", "layers.1")),
    "medusa, own output heads": numbered("blocks", 3, linear("layers.0")) | weights(*(f"lm_heads.{n}" for n in range(3))),
    "hydra": numbered("blocks", 3, GROUNDED | linear("blocks.layers.1")) | weights("embedding_norm"),
    "hydra, prefix": numbered("blocks", 3, GROUNDED) | weights("embedding_norm") | {f"prefix_layer.{name}" for name in LAYER},
    "eagle3": EAGLE | numbered("fc_norm", 3, {"weight"}) | numbered("layers", 1, LAYER),
    "eagle3, all options": EAGLE | weights("fc_norm.0", "fc_norm.1") | numbered("layers", 2, LAYER),
    "eagle3, own parts": EAGLE | weights("input_norm", "embed_tokens") | numbered("layers", 1, LAYER),
    "peagle": EAGLE | {"mask_hidden"} | numbered("layers", 2, LAYER),
    "dflash": BLOCKS,
    "dspark": BLOCKS | weights("markov_head.markov_w1", "markov_head.markov_w2") | linear("confidence_head.proj"),
    "dflash2": BLOCKS
    | {f"layers.{n}.{conv}.{name}" for n in range(2) for conv in ("attention_conv", "mlp_conv") for name in CONVOLUTION}
    | {f"candidate_selector.{name}" for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")},
    "xpress": BLOCKS | {"refiner_head.mix_l"} | weights(*(f"refiner_head.{name}" for name in REFINER)),
    "domino": BLOCKS | {"prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0"} | weights("embed_proj.0", "embed_proj.2"),
    "mtp": numbered("layers", 1, MODULE),
    "early_exit": weights("norm", "layer.input_layernorm") | {f"layer.{name}" for name in ATTENTION},
}


@pytest.mark.parametrize(("name", "reduced"), [*((name, False) for name in NAMES), *((name, True) for name in PLAIN)])
def test_it_comes_back_from_its_artifact_under_the_names_that_engines_know(tmp_path, name, reduced, as_target):
    target, vocabulary = as_target(checks.tiny_target("llama")), checks.SOME_TOKENS if reduced else None
    checks.assert_comes_back(tmp_path / "head", checks.build(SETTINGS[name], target.model, vocabulary), target, vocabulary)
    assert load_file(tmp_path / "head" / WEIGHTS_FILE).keys() == NAMES[name] | ({"lm_head.weight"} if reduced else set())


# --- how many drafts ----------------------------------------------------------------------------------------------


BY_HEADS, BY_SLOTS = ("medusa", "hydra", "peagle"), ("dflash", "dspark", "dflash2", "xpress", "domino")
LONGEST = dict.fromkeys(BY_HEADS, 3) | dict.fromkeys(BY_SLOTS, 4) | {"mtp": 9, "early_exit": 9}  # of any number


@pytest.mark.parametrize(("name", "longest"), LONGEST.items())
@torch.no_grad()
def test_it_drafts_no_more_than_it_can_and_the_same_whatever_it_is_asked_for(name, longest):
    model = checks.tiny_target("llama")
    head = checks.build(SETTINGS[name], model)
    tokens, drafts = [[*checks.PROMPTS[0], 1]], {}
    for asked in (1, longest, 9):
        proposer = FAMILIES[head.settings.kind].propose(head, model.device)
        rounds = checks.Rounds(proposer, model)
        rounds.start(tokens)
        rng = CounterRNG(0, [0], model.device)
        drafts[asked] = proposer.propose(RoundInputs.of(tokens, rng), asked, SamplingConfig(), keep_logits=True)
        assert drafts[asked].num_drafted.host == [min(asked, longest)]
        torch.testing.assert_close(drafts[asked].logits_BGV[:, :1], drafts[1].logits_BGV)
    torch.testing.assert_close(drafts[9].logits_BGV, drafts[longest].logits_BGV)


# --- targets of many families --------------------------------------------------------------------------------------


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
    checks.assert_comes_back(tmp_path / "artifact", head, target, vocab_size=VOCAB_SIZE)


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
