"""What a family goes through, stage by stage: loading, each way of decoding, training of heads and drafts, other forwards.

The reference is transformers' own model: its `generate`, its forward over a whole text, its gradients. In some families its
cached forward differs from the uncached one (Moshi), or `generate` drops the cache at a length (Phi-4 multimodal); ours has to
agree with one of them throughout. A stage raises `Wrong` where it does not; an `InputError` is a refusal.
T positions, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from configs.runtime.errors import InputError
from configs.schema.decoding import DecodeConfig
from configs.schema.drafting import StaticTree
from configs.schema.heads import Eagle3Settings, HeadSettings, MtpSettings
from configs.schema.learning import LossConfig, StudentConfig
from configs.schema.target import TargetConfig
from distill.dataset.batches import Example, collate
from distill.loss.draft_objective import DraftObjective, target_hidden
from distill.loss.head_objective import HeadObjective
from distill.student.init import initial_draft
from eval.decoder.decode import generate
from heads.artifact import Metadata, head_metadata, load_draft, save_draft_lm, save_head
from heads.families.registry import FAMILIES
from heads.inference.causal_lm import register_forward
from heads.inference.lean_forward import FAMILIES as LEAN_FAMILIES
from heads.inference.lean_forward import make_lean
from heads.proposers.protocol import Proposer
from heads.target.hidden_states import num_blocks, read_states
from heads.target.loading import Target, load_target
from scripts.models_check.architectures import VOCAB_SIZE, tiny_model
from scripts.models_check.scripted_drafts import ScriptedDrafts

PROMPTS = [list(range(3, 14)), list(range(40, 47)), list(range(90, 96))]
NEW_TOKENS, SAMPLED_TOKENS = 24, 14
STEPS = 3
TRAINED = [Example(tuple(range(start, start + 24)), 4) for start in (20, 90)]
TREE = StaticTree(kind="static", branching=[2, 2, 1])
KEPT_BLOCKS = ([0, 1, 3], [1, 3], [0, 1])
TIE = 1e-4  # two logits this close, as a share of the largest, may change places by rounding
ROUNDING = 1e-3  # of log-probabilities, as a share of their spread


class Wrong(Exception):
    """What came out is not what transformers computes; the message says what differs."""


@dataclass
class Case:
    """A family on its way through the stages.

    Args:
        model: built of the tiny config; the reference.
        folder: where it is saved.
        target: as loaded from there.
        answers: what transformers' `generate` continues the prompts by.
        artifacts: the drafts that were trained and saved.
    """

    model: PreTrainedModel
    folder: Path
    loaded: Target | None = None
    answers: list[list[int]] = field(default_factory=list)
    artifacts: list[Path] = field(default_factory=list)

    @property
    def target(self) -> Target:
        assert self.loaded is not None
        return self.loaded


def open_case(name: str, folder: Path) -> Case:
    """Build a family's model, and let transformers answer the prompts."""
    model = tiny_model(name)
    return Case(model=model, folder=folder, answers=[reference_answer(model, prompt) for prompt in PROMPTS])


def reference_answer(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """Return what transformers' `generate` continues a prompt by."""
    ids_1T = torch.tensor([prompt])
    text_1T = model.generate(ids_1T, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return text_1T[0, len(prompt) :].tolist()


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose token n is the word `wn`, without any special token."""
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


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
        raise Wrong(f"the loaded model's logits differ from the saved one's by {error:.2g} of them")


def plain(case: Case) -> None:
    """Decode without drafts."""
    check_answers(case, range(3), DecodeConfig(num_speculative_tokens=0))


def chain(case: Case) -> None:
    """Decode with chains of three drafts, some of them wrong, one prompt at a time."""
    check_answers(case, range(3), DecodeConfig())


def batch(case: Case) -> None:
    """Decode prompts of unequal lengths together."""
    check_answers(case, range(3), DecodeConfig(batch_size=3))


def tree(case: Case) -> None:
    """Decode with trees, one prompt at a time, and together where batches are decoded at all."""
    check_answers(case, range(3), DecodeConfig(tree=TREE))
    try:
        check_answers(case, range(3), DecodeConfig(batch_size=3))
    except (InputError, Wrong):
        return
    check_answers(case, range(3), DecodeConfig(tree=TREE, batch_size=3))


def check_answers(
    case: Case, numbers: Sequence[int], settings: DecodeConfig, proposer: Proposer | None = None, target: Target | None = None
) -> None:
    """Decode some of the prompts greedily, by default with drafts that are right and wrong in turns, and compare the answers.

    Raises:
        Wrong: one is not transformers', and not for a near tie.
    """
    target = target or case.target
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, case.answers, strict=True)]
    if proposer is None and settings.num_speculative_tokens:
        proposer = ScriptedDrafts(texts, VOCAB_SIZE)
    settings = settings.model_copy(update={"max_new_tokens": NEW_TOKENS})
    found = generate(target, [PROMPTS[number] for number in numbers], settings, proposer)
    for number, answer in zip(numbers, found, strict=True):
        room = target.max_positions - len(PROMPTS[number])
        expected = case.answers[number][:room]
        if answer != expected and not is_likeliest(case.model, PROMPTS[number], answer, min(room, NEW_TOKENS)):
            place = next((place for place, pair in enumerate(zip(expected, answer, strict=False)) if len(set(pair)) > 1), None)
            where = f"after {len(answer)} of {len(expected)} tokens" if place is None else f"at token {place}"
            raise Wrong(f"answer {number} departs from transformers' generate {where}")


@torch.no_grad()
def is_likeliest(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int], length: int) -> bool:
    """Say whether each token of an answer of this length is the likeliest, up to rounding, by a forward over the whole text."""
    logits_TV = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    behind_T = logits_TV.amax(-1) - logits_TV.gather(-1, torch.tensor(answer).unsqueeze(-1)).squeeze(-1)
    return len(answer) == length and bool((behind_T < TIE * logits_TV.abs().amax(-1)).all())


@torch.no_grad()
def sampled(case: Case) -> None:
    """Sample at temperature 1: every distribution that drafts are held against is the model's own after that text."""
    seen: dict[tuple[int, ...], Tensor] = {}

    def note(ids_NT: Tensor, scores_NV: Tensor) -> Tensor:
        seen.update(zip(map(tuple, ids_NT.tolist()), scores_NV, strict=True))
        return scores_NV

    texts = [prompt + answer for prompt, answer in zip(PROMPTS, case.answers, strict=True)]
    settings = DecodeConfig(temperature=1.0, max_new_tokens=SAMPLED_TOKENS)
    generate(case.target, PROMPTS[:1], settings, ScriptedDrafts(texts, VOCAB_SIZE), logits_processor=note)
    for text, scores_V in seen.items():
        if len(text) > case.target.max_positions:
            continue
        error = distance(scores_V, case.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1])
        if not error < ROUNDING and not distance(scores_V, cached_logits(case.model, text, len(PROMPTS[0]))) < ROUNDING:
            raise Wrong(f"log-probabilities after {len(text)} tokens are off by {error:.2g} of their spread")


def distance(found_V: Tensor, expected_V: Tensor) -> float:
    """Return the largest difference of two log-probabilities, as a share of how far they spread."""
    difference_V = expected_V.log_softmax(-1) - found_V[: len(expected_V)].log_softmax(-1)
    return float(difference_V.abs().max() / expected_V.std())


def cached_logits(model: PreTrainedModel, text: Sequence[int], num_prompt: int) -> Tensor:
    """Return the logits `[V]` after a text that `generate` reads token by token from the prompt on."""
    generated = model.generate(
        torch.tensor([text[:num_prompt]]),
        max_new_tokens=len(text) - num_prompt + 1,
        do_sample=False,
        pad_token_id=0,
        prefix_allowed_tokens_fn=lambda _, ids_T: [*text[len(ids_T) : len(ids_T) + 1]] or list(range(VOCAB_SIZE)),
        return_dict_in_generate=True,
        output_logits=True,
    )
    return generated.logits[-1][0]


# --- training -------------------------------------------------------------------------------------------------------


def eagle3(case: Case) -> None:
    """Train an EAGLE-3 head for some steps."""
    total = num_blocks(case.target.model)
    train_head(case, Eagle3Settings(kind="eagle3", taps=sorted({1, max(1, total // 2), total}), num_depths=3))


def mtp(case: Case) -> None:
    """Train an MTP module around one of the family's blocks for some steps."""
    train_head(case, MtpSettings(kind="mtp", num_depths=3))


def train_head(case: Case, settings: HeadSettings) -> None:
    target, examples = case.target, collate(TRAINED)
    head = FAMILIES[settings.kind].build(settings, target.model, None).train()
    states = read_states(target.model, examples.input_ids_BT, head.taps)
    objective = HeadObjective(head, target, LossConfig())
    # A copied block may have parameters that its family sets by other means than gradients.
    learning = names_with_gradient(case.model, examples.input_ids_BT)
    set_otherwise = [name for name, _ in case.model.named_parameters() if name not in learning]
    ends = tuple("." + ".".join(name.split(".")[-2:]) for name in set_otherwise)
    named = objective.named_parameters()
    wanted = [name for name, parameter in named if parameter.requires_grad and not name.endswith(ends)]
    train(objective, lambda: objective(examples, states, examples.loss_mask_BT.sum(), 1).loss, wanted)
    metadata = head_metadata(
        settings,
        head.taps,
        target.identity,
        None,
        target.vocab_size,
        num_speculative_tokens=3,
        training={},
        provenance={},
    )
    save_head(case.folder / settings.kind, head, metadata)
    case.artifacts.append(case.folder / settings.kind)


def distill(case: Case) -> None:
    """Distil a draft of some of the target's blocks for some steps."""
    target, examples = case.target, collate(TRAINED)
    draft = kept_draft(target)
    signal = target_hidden(target, examples)
    objective = DraftObjective(draft, target, LossConfig())
    wanted = [f"draft.{name}" for name in names_with_gradient(draft, examples.input_ids_BT)]

    def loss() -> Tensor:
        return objective(examples.input_ids_BT, examples.loss_mask_BT, signal, examples.loss_mask_BT.sum(), 1).loss

    train(objective, loss, wanted)
    metadata = Metadata(
        kind="draft_lm",
        target=target.identity.to_dict(),
        draft_vocab_size=target.vocab_size,
        num_speculative_tokens=3,
        training={},
        provenance={},
    )
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


def names_with_gradient(model: PreTrainedModel, ids_BT: Tensor) -> list[str]:
    """Return the parameters that a loss on transformers' own logits has a gradient for that is not 0."""
    own = copy.deepcopy(model).requires_grad_(True)
    own(input_ids=ids_BT, use_cache=False).logits.logsumexp(-1).sum().backward()
    return [name for name, parameter in own.named_parameters() if parameter.grad is not None and bool(parameter.grad.any())]


def train(module: nn.Module, loss: Callable[[], Tensor], wanted: Sequence[str]) -> None:
    """Take some steps.

    Raises:
        Wrong: a loss or gradient is not finite, or a parameter of these names has none, or only zeros, in every step.
    """
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(named.values(), lr=1e-3)
    missing = set(wanted) & named.keys()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss().backward()
        gradients = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
        if bad := [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]:
            raise Wrong(f"step {step}: the gradient of {bad[0]} is not finite")
        missing -= {name for name, gradient in gradients.items() if bool(gradient.any())}
        optimizer.step()
    if missing:
        raise Wrong(f"{len(missing)} parameters get no gradient, {min(missing)} among them")


def artifact(case: Case) -> None:
    """Load the drafts that were trained and decode with them."""
    for folder in case.artifacts:
        draft = load_draft(folder, case.target.identity, case.target.model)
        check_answers(case, range(2), DecodeConfig(), draft.proposer)


# --- forwards -------------------------------------------------------------------------------------------------------


def lean(case: Case) -> None:
    """Decode by the lean forward."""
    if not isinstance(case.target.model, LEAN_FAMILIES):
        raise NotMeant
    make_lean(case.target.model)
    try:
        check_answers(case, range(3), DecodeConfig(batch_size=3))
    finally:
        register_forward(case.target.model, None)


class NotMeant(Exception):
    """The stage is not for this family."""


# In their order; what a stage needs of those before it is there, or it is not reached.
STAGES: dict[str, Callable[[Case], None]] = {
    "load": load,
    "plain": plain,
    "chain": chain,
    "batch": batch,
    "tree": tree,
    "sampled": sampled,
    "eagle3": eagle3,
    "mtp": mtp,
    "distill": distill,
    "artifact": artifact,
    "lean": lean,
}
