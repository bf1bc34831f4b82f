"""What a family goes through, stage by stage: loading, each way of decoding, training of heads and drafts, other forwards.

T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch._dynamo
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig, StaticTree
from configs.schema.heads import Eagle3Settings, MtpSettings
from configs.schema.target import TargetConfig
from configs.schema.training import LossConfig, StudentConfig
from distill.dataset.batches import Example, collate
from distill.loss.objectives import DraftObjective, HeadObjective
from distill.signals import SignalSource
from distill.student.init import initial_draft
from eval.decoder.records import Request
from heads.artifact import load_draft, save_draft_lm, save_head
from heads.families.registry import FAMILIES
from heads.frozen.hidden_states import check_taps, num_blocks, read_states
from heads.frozen.loading import Target, load_target, load_with
from heads.frozen.weights import auto_class
from heads.inference.lean_forward import FAMILIES as LEAN_FAMILIES
from heads.inference.lean_forward import make_lean
from heads.metadata import Metadata, head_metadata
from heads.modules.output_head import HeadModule
from tests.models.cases import (
    PROMPTS,
    ROUNDING,
    TIE,
    Case,
    Mismatch,
    NotApplicable,
    cached_logits,
    check_answers,
    distance,
    names_with_gradient,
    uncached_logits,
)
from tests.models.media_stage import media
from tests.support.architectures import VOCAB_SIZE, word_tokenizer
from tests.support.scripted_drafts import ScriptedDrafts, judged_logits

SAMPLED_TOKENS = 14
STEPS = 3
UNSAID: Any = {"num_speculative_tokens": 3, "training": {}, "provenance": {}}  # of artifacts
TRAINED = [Example(tuple(range(start, start + 24)), 4) for start in (20, 90)]
TREE = StaticTree(kind="static", branching=[2, 2, 1])
FAR = 8192  # positions, where rounded rotary frequencies turn by the wrong angle
KEPT_BLOCKS = ([0, 1, 3], [1, 3], [0, 1])


# --- decoding -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load(case: Case) -> None:
    """Save the model and load it as a target: its logits are those of the model that was saved."""
    case.model.save_pretrained(case.folder / "target")
    word_tokenizer().save_pretrained(case.folder / "target")
    case.loaded = load_target(TargetConfig(name=str(case.folder / "target"), dtype="float32", device="cpu"))
    ids_1T = torch.tensor([PROMPTS[0] * 3])
    expected, found = (model(input_ids=ids_1T, use_cache=False).logits for model in (case.model, case.target.model))
    if (error := float((expected - found).abs().max() / expected.abs().max())) > TIE:
        raise Mismatch(f"the loaded model's logits differ from the saved one's by {error:.2g} of them")


@torch.no_grad()
def same_as_transformers(case: Case) -> None:
    """Load the target in each dtype: its logits are to the bit those of the model as transformers loads it, also far on."""
    folder, ids_1T = case.folder / "target", torch.tensor([PROMPTS[0] * 3])

    def read(folder: Path, dtype: str, attention: str) -> PreTrainedModel:
        return auto_class(case.model.config).from_pretrained(folder, dtype=dtype, attn_implementation=attention)

    far_1T = torch.arange(FAR - ids_1T.shape[1], FAR).unsqueeze(0)
    for dtype in ("float32", "bfloat16", "float16"):
        theirs = load_with("sdpa", partial(read, folder, dtype)).eval()
        for positions in ({}, {"position_ids": far_1T}):
            try:
                expected = theirs(input_ids=ids_1T, use_cache=False, **positions).logits
            except Exception:  # transformers does not run it in this dtype, or so far
                continue
            ours = load_target(TargetConfig(name=str(folder), dtype=dtype, device="cpu")).model
            found = ours(input_ids=ids_1T, use_cache=False, **positions).logits
            if not torch.equal(expected.nan_to_num(), found.nan_to_num()):
                where = "far positions" if positions else "the first positions"
                raise Mismatch(f"in {dtype} the target's logits at {where} are not those of the model as transformers loads it")


def plain(case: Case) -> None:
    check_answers(case, range(3), DecodeConfig(num_speculative_tokens=0))


def chain(case: Case) -> None:
    check_answers(case, range(3), DecodeConfig())


def batch(case: Case) -> None:
    check_answers(case, range(3), DecodeConfig(batch_size=3))


def tree(case: Case) -> None:
    """Decode with trees, one prompt at a time, and together where batches are decoded at all."""
    check_answers(case, range(3), DecodeConfig(tree=TREE))
    try:
        check_answers(case, range(3), DecodeConfig(batch_size=3))
    except (InputError, Mismatch):
        return
    check_answers(case, range(3), DecodeConfig(tree=TREE, batch_size=3))


@torch.no_grad()
def sampled(case: Case) -> None:
    """Sample at temperature 1: every distribution that drafts are held against is the model's own after that text."""
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, case.answers, strict=True)]
    settings = DecodeConfig(temperature=1.0, max_new_tokens=SAMPLED_TOKENS)
    request = Request(prompt_id="0", category="", tokens=tuple(PROMPTS[0]))
    for text, scores_V in judged_logits(case.target, request, settings, ScriptedDrafts(texts, VOCAB_SIZE)).items():
        if len(text) > case.target.max_positions:
            continue
        error = distance(scores_V, uncached_logits(case.model, text)[-1])
        if not error < ROUNDING and not distance(scores_V, cached_logits(case.model, text, len(PROMPTS[0]))) < ROUNDING:
            raise Mismatch(f"log-probabilities after {len(text)} tokens are off by {error:.2g} of their spread")


# --- training -------------------------------------------------------------------------------------------------------


def eagle3(case: Case) -> None:
    total = num_blocks(case.target.model)
    train_head(case, Eagle3Settings(kind="eagle3", taps=sorted({1, max(1, total // 2), total}), num_depths=3))


def mtp(case: Case) -> None:
    train_head(case, MtpSettings(kind="mtp", num_depths=3))


def train_head(case: Case, settings: Eagle3Settings | MtpSettings) -> None:
    target, examples = case.target, collate(TRAINED)
    head = FAMILIES[settings.kind].build(settings, target.model, None).train()
    taps = cast(HeadModule, head).taps
    check_taps(target.model, taps)
    states = read_states(target.model, examples.input_ids_BT, taps)
    objective = HeadObjective(head, target, LossConfig())
    # A block of the family's may have parameters that are set by other means than gradients; they get none in the model either.
    learning = [f".{name}" for name in names_with_gradient(case.model, examples.input_ids_BT)]
    wanted = []
    for name, parameter in objective.named_parameters():
        _, _, in_block = name.partition("mtp_block")
        if parameter.requires_grad and (not in_block or any(each.endswith(in_block) for each in learning)):
            wanted.append(name)
    train(objective, lambda: objective(examples, states).loss / examples.loss_mask_BT.sum(), wanted)
    metadata = head_metadata(settings, taps, target.identity, None, target.vocab_size, **UNSAID)
    save_head(case.folder / settings.kind, head, metadata)
    case.artifacts.append(case.folder / settings.kind)


def distill(case: Case) -> None:
    target, examples = case.target, collate(TRAINED)
    draft = kept_draft(target)
    signal = SignalSource(target).read(examples).states.final_BTE
    objective = DraftObjective(draft, target, LossConfig())
    wanted = [f"draft.{name}" for name in names_with_gradient(draft, examples.input_ids_BT)]

    def loss() -> Tensor:
        return objective(examples, signal).loss / examples.loss_mask_BT.sum()

    train(objective, loss, wanted)
    own: Any = {"kind": "draft_lm", "target": target.identity.to_dict(), "draft_vocab_size": target.vocab_size}
    metadata = Metadata(**own, **UNSAID)
    save_draft_lm(case.folder / "draft_lm", draft.eval(), target.tokenizer, metadata)
    case.artifacts.append(case.folder / "draft_lm")


def kept_draft(target: Target) -> PreTrainedModel:
    """Return a draft of the first choice of blocks that is not refused; where all are, raise the first refusal."""
    refusals: list[InputError] = []
    for layers in KEPT_BLOCKS:
        try:
            return initial_draft(StudentConfig(layers=layers, train_embeddings=True), target)
        except InputError as refusal:
            refusals.append(refusal)
    raise refusals[0]


def train(module: nn.Module, loss: Callable[[], Tensor], wanted: Sequence[str]) -> None:
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(named.values(), lr=1e-3)
    missing = set(wanted) & named.keys()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss().backward()
        gradients = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
        if bad := [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]:
            raise Mismatch(f"step {step}: the gradient of {bad[0]} is not finite")
        missing -= {name for name, gradient in gradients.items() if bool(gradient.any())}
        optimizer.step()
    if missing:
        raise Mismatch(f"{len(missing)} parameters get no gradient, {min(missing)} among them")


def artifact(case: Case) -> None:
    for folder in case.artifacts:
        draft = load_draft(folder, case.target.identity, case.target.model)
        check_answers(case, range(2), DecodeConfig(), draft.proposer)


# --- forwards -------------------------------------------------------------------------------------------------------


def lean(case: Case) -> None:
    if not isinstance(case.target.model, LEAN_FAMILIES):
        raise NotApplicable
    make_lean(case.target.model)
    try:
        check_answers(case, range(3), DecodeConfig(batch_size=3))
    finally:
        case.target.runner.forward = None


# In their order; what a stage needs of those before it is there, or it is not reached.
STAGES: dict[str, Callable[[Case], None]] = {
    "load": load,
    "same_as_transformers": same_as_transformers,
    "plain": plain,
    "chain": chain,
    "batch": batch,
    "tree": tree,
    "sampled": sampled,
    "eagle3": eagle3,
    "mtp": mtp,
    "distill": distill,
    "artifact": artifact,
    "media": media,
    "lean": lean,
}
