"""This machine's accelerator computes what its CPU does: losses, tokens, artifacts (`make gpu-check`)."""

import pytest
import torch
from safetensors.torch import load_file

from configs.schema.decoding import DecodeConfig
from configs.schema.evaluation import LosslessConfig
from configs.schema.target import TargetConfig
from configs.schema.training import LossConfig
from distill.loss.objectives import HeadObjective
from eval.decoder.decode import Request, decode
from eval.teacher_forcing import check_tokens
from heads.artifact import load_draft
from heads.device import default_device, has_graphs
from heads.families.registry import FAMILIES, serve
from heads.frozen.hidden_states import read_states
from heads.frozen.loading import load_target
from heads.modules.output_head import HeadModule
from heads.proposers.lookup import PromptLookup
from heads.vocabulary import DraftVocabulary
from tests.support.launches import BLOCKS, Launches, head_of, run_under_way, tiny_batch, tiny_target
from tests.support.tiny_heads import save_artifact

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

SAME_LOSS, SAME_GRADIENT = 1e-5, 1e-4  # relative, float32
BF16_LOSS = 0.03  # relative, of bfloat16 products: eight bits a number, which a sum over many evens out
KERNELS_OVER = 1.3  # of those counted on a CPU: some operations start two
PROPOSERS = {
    "plain": lambda target: None,
    "prompt lookup": lambda target: PromptLookup(target.device),
    "an untrained EAGLE-3": lambda target: FAMILIES["eagle3"].propose(
        serve(head_of("eagle3", target), target.model), target.device
    ),
}


@pytest.fixture(scope="module")
def device():
    if (found := default_device()).type == "cpu":
        pytest.skip("this machine has no accelerator")
    return found


@pytest.fixture(scope="module")
def pair(device, tmp_path_factory):
    """A tiny target on the CPU, and the same on the accelerator."""
    return [tiny_target(tmp_path_factory.mktemp(name) / "target", name) for name in ("cpu", str(device))]


@pytest.fixture(scope="module")
def real(device):
    """The embedded target in float32 on the CPU and on the accelerator, and prompts for it."""
    name = "embedded:smollm2-135m-instruct"
    targets = [load_target(TargetConfig(name=name, dtype="float32", device=where)) for where in ("cpu", str(device))]
    asked = [f"Name {number} things that are {word}." for number in (2, 3, 5) for word in ("blue", "round", "loud", "old")]
    tokens = [tuple(targets[0].encode_chat([{"role": "user", "content": text}])) for text in asked]
    return targets, [Request(prompt_id=str(n), category="", tokens=ids) for n, ids in enumerate(tokens)]


def loss_and_gradient(kind, target, *, autocast=False):
    head = head_of(kind, target)
    if (start := FAMILIES[kind].start) is not None:
        start(head, target.model)
    batch = tiny_batch().to(target.device)
    states = read_states(target.model, batch.input_ids_BT, tuple(head.taps) if isinstance(head, HeadModule) else ())
    torch.manual_seed(0)  # of families that draw origins
    with torch.autocast(target.device.type, torch.bfloat16, enabled=autocast):
        loss = HeadObjective(head, target, LossConfig())(batch, states).loss / batch.loss_mask_BT[:, 1:].sum()
    loss.backward()
    gradients = [each.grad for each in head.parameters() if each.grad is not None]
    return float(loss.detach()), float(torch.nn.utils.get_total_norm(gradients))


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_familys_loss_and_gradient_are_the_cpus(pair, kind):
    (loss, gradient), (other, their_gradient) = (loss_and_gradient(kind, target) for target in pair)
    assert other == pytest.approx(loss, rel=SAME_LOSS)
    assert their_gradient == pytest.approx(gradient, rel=SAME_GRADIENT)
    rounded, _ = loss_and_gradient(kind, pair[1], autocast=True)
    assert rounded == pytest.approx(loss, rel=BF16_LOSS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", PROPOSERS)
def test_answers_are_the_cpus_but_for_ties(real, name, temperature):
    targets, requests = real
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=48, temperature=temperature, verification="block")
    expected, found = (decode(target, requests, config, PROPOSERS[name](target))[0] for target in targets)
    if temperature == 0:
        assert check_tokens(targets[0], expected, found, LosslessConfig().tie_noise).wrong_answers == set()
    else:  # a draw that falls between two tokens' sums may fall either way
        assert sum(one.tokens != other.tokens for one, other in zip(expected, found, strict=True)) <= 1


def test_in_bfloat16_drafts_change_no_answer_but_for_ties(real, device):
    _, requests = real
    target = load_target(TargetConfig(name="embedded:smollm2-135m-instruct", dtype="bfloat16", device=str(device)))
    config = DecodeConfig(num_speculative_tokens=3, max_new_tokens=48)
    plain, drafted = (
        decode(target, requests, config, PROPOSERS[name](target))[0] for name in ("plain", "an untrained EAGLE-3")
    )
    assert check_tokens(target, plain, drafted, LosslessConfig().tie_noise).wrong_answers == set()


def test_an_artifact_written_from_the_accelerator_is_read_on_the_cpu(pair, tmp_path):
    here, there = pair
    half = DraftVocabulary(token_ids_W=torch.arange(0, 64, 2), target_vocab_size=64)
    save_artifact(tmp_path, head_of("eagle3", there).requires_grad_(False), there.identity.to_dict(), half)
    assert all(bool(torch.isfinite(each).all()) for each in load_file(tmp_path / "model.safetensors").values())
    assert load_draft(str(tmp_path), here.identity, here.model).metadata.kind == "eagle3"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_round_starts_the_kernels_that_were_counted_and_copies_once_each_way(pair, device, temperature):
    if not has_graphs(device):
        pytest.skip("torch's profiler sees kernels of CUDA devices alone")
    counted, run = Launches(), run_under_way("eagle3", pair[0], temperature)
    with torch.inference_mode(), counted.counting():
        run.round()
    run = run_under_way("eagle3", pair[1], temperature)
    with torch.inference_mode(), run.clock.phase("decode"):
        run.round()
        with torch.profiler.profile(activities=torch.profiler.supported_activities()) as seen:
            run.round()
    names = [event.name for event in seen.events() if event.device_type != torch.autograd.DeviceType.CPU]
    copies = [sum(f"Memcpy {way}" in name for name in names) for way in ("HtoD", "DtoH")]
    assert len(names) - sum(copies) <= KERNELS_OVER * counted.total, f"of a Llama of {BLOCKS} blocks"
    assert max(copies) <= 1
