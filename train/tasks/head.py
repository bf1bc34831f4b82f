"""Training a head on the frozen target as a `train.loop.loop.Task`: loss, score on held-out prompts, artifact."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from accelerate import Accelerator
from torch import Tensor, nn

from configs.runtime.errors import ConfigError, InputError
from configs.schema.training import HeadsConfig
from distill.cache.reader import TargetCache
from distill.dataset.conversations import Conversation
from distill.loss.objectives import HeadLoss, HeadObjective
from distill.signals import SignalSource, TargetSignals
from eval.decoder.decode import check_drafts
from heads.artifact import load_vocabulary, save_head
from heads.device import restored_random_state
from heads.families.registry import FAMILIES, serve
from heads.frozen.hidden_states import TargetStates, check_taps
from heads.frozen.loading import Target
from heads.frozen.weights import read_tensors
from heads.inference.model_checks import check_keeps_apart, check_rolls_back
from heads.metadata import WEIGHTS_FILE, Metadata, check_made_for, head_metadata, locate_artifact, read_metadata
from heads.modules.interface import Batch
from heads.modules.layers import checkpoint_activations
from heads.modules.output_head import HeadModule
from heads.proposers.protocol import Proposer
from heads.vocabulary import DraftVocabulary
from train.loop.checkpoints import Progress
from train.loop.loop import BatchLoss
from train.loop.telemetry import StepClock
from train.resolve import choose_vocabulary
from train.tasks.held_out import HeldOut, training_prompts, training_provenance

log = logging.getLogger("draftsmith")

# In these a head may differ from the one that it starts from: they are of training, of weights at the start, or say how far
# back attention reads
MAY_DIFFER = {"draft_vocab_size", "depth_decay", "init_block", "window"}


class HeadTask:
    """A head under training (`train.loop.loop.Task`); with a cache the target runs on no batch of the training.

    Raises:
        InputError: the target cannot carry the head or be run on packed rows, the cache lacks states that the head reads, or a
            held-out prompt cannot be decoded, or not by a tree with this head.
    """

    def __init__(
        self,
        config: HeadsConfig,
        target: Target,
        train: Sequence[Conversation],
        held_out: Sequence[Conversation],
        accelerator: Accelerator,
        cache: TargetCache | None = None,
    ) -> None:
        self.target = target
        self.clock = StepClock(accelerator.device)
        check_rolls_back(target.model)
        if config.data.packing and cache is None:
            check_keeps_apart(target.model)
        self.family = FAMILIES[config.head.kind]
        start = None if config.init is None else read_initial_head(config.init, target)
        self.vocabulary = choose_vocabulary(config.head.draft_vocab_size, target, train) if start is None else start.vocabulary
        if start is not None:
            size = None if self.vocabulary is None else len(self.vocabulary)
            config = config.model_copy(update={"head": config.head.model_copy(update={"draft_vocab_size": size})})
        head = self.family.build(config.head, target.model, self.vocabulary).float()
        if self.family.start is not None:
            self.family.start(head, target.model)
        if start is not None:
            start.fill(head)
        self.taps = cast(HeadModule, head).taps
        check_taps(target.model, self.taps)
        if target.states_from is not None:
            target.states_from.serve(self.taps)  # held-out decoding asks for them where a cache has those of the data, too
        if cache is not None:
            cache.check_keeps(self.taps)
        self.source = SignalSource(target, self.taps, cache, normalised=True)
        if config.schedule.activation_checkpointing:
            checkpoint_activations(head)
        self.config = config
        self.module: nn.Module = HeadObjective(head, target, config.loss)
        self.training_prompts = training_prompts(train, None if start is None else start.folder)
        self.held_out = HeldOut(config, target, held_out, accelerator)
        if config.held_out.decode.tree is not None:
            check_drafts(self.proposer(self.module), config.held_out.decode)  # now, not at the first held-out decoding

    drafts_while_training = False

    def copy_of_module(self) -> nn.Module:
        shared = (self.target, self.target.model)
        return copy.deepcopy(self.module, {id(each): each for each in shared})

    def units(self) -> Sequence[nn.Module]:
        return []  # families read weights in ways of their own: a head is one unit

    def read_from_outside(self) -> Sequence[nn.Parameter]:
        return []  # no head is trained under ZeRO-3

    def prepare(self, module: nn.Module, batches: list[Batch], step: int) -> tuple[list[Batch], Mapping[str, Tensor]]:
        return batches, {}

    def loss(self, module: nn.Module, batch: Batch, signals: TargetSignals) -> BatchLoss:
        result: HeadLoss = module(batch, signals.states, signals.normalisers)
        sums, counts = _metrics(result)
        return BatchLoss(loss=result.loss, sums=sums, counts=counts)

    def states(self, batch: Batch) -> TargetStates:
        """Return the target's states over a batch of any conversations; processes that share the target bring the same one."""
        return SignalSource(self.target, self.taps).read(batch).states

    def evaluate(self, module: nn.Module) -> dict[str, float]:
        """Decode held-out prompts with the head, and predict the result from its agreement with the answers."""
        assert isinstance(module, HeadObjective)
        return self.held_out.score(self.proposer(module)) | self.held_out.predict(module, self.states)

    def proposer(self, module: nn.Module) -> Proposer:
        return self.family.propose(serve(self.copy_of(module), self.target.model), self.target.device)

    def save(self, module: nn.Module, progress: Progress, metrics: dict[str, float]) -> None:
        self.write(Path(self.config.output) / "artifact", module, progress, metrics)

    def write(self, folder: Path, module: nn.Module, progress: Progress, metrics: dict[str, float]) -> None:
        """Write the head, in the target's dtype, as an artifact."""
        assert isinstance(module, HeadObjective)
        metadata = head_metadata(
            cast(HeadModule, module.head).settings,
            self.taps,
            self.target.identity,
            self.vocabulary,
            self.target.vocab_size,
            num_speculative_tokens=self.config.num_speculative_tokens,
            training=self.config.model_dump(mode="json"),
            provenance=training_provenance(progress, metrics, self.config.data.train),
        )
        save_head(folder, serve(self.copy_of(module), self.target.model), metadata, self.vocabulary, self.training_prompts)

    def copy_of(self, module: nn.Module) -> nn.Module:
        """Return a new head with the trained weights, made as when an artifact is loaded; the random state is restored."""
        assert isinstance(module, HeadObjective)
        with restored_random_state(self.target.device):
            head = self.family.build(self.config.head, self.target.model, self.vocabulary)
        head.load_state_dict(module.head.state_dict())
        return head


def _metrics(result: HeadLoss) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return sums and what divides them; `conditional_k` is of those that agreed before, `joint_k` of all origins."""
    sums: dict[str, Tensor] = {"loss": result.values_K.sum()}
    counts: dict[str, Tensor] = {"loss": result.labels_K.sum()}
    for name, sums_K, counts_K in (
        ("top1_agreement", result.agrees_K, result.labels_K),
        ("acceptance", result.acceptance_K, result.labels_K),
        ("conditional", result.joint_agrees_K, result.reached_K),
        ("joint", result.joint_agrees_K, result.origins_K),
    ):
        for number, (total, count) in enumerate(zip(sums_K, counts_K, strict=True), start=1):
            sums[f"{name}_{number}"], counts[f"{name}_{number}"] = total, count
    return sums, counts


@dataclass(frozen=True, kw_only=True)
class InitialHead:
    """A head's artifact, read to be trained on; its draft vocabulary is kept, as the weights' rows are those of its tokens."""

    folder: Path
    metadata: Metadata
    vocabulary: DraftVocabulary | None

    def fill(self, head: nn.Module) -> None:
        """Give a head that was built by the run's config the artifact's weights, if the config describes this head."""
        built = cast(HeadModule, head)
        theirs: dict[str, Any] = {**(self.metadata.head or {}), "kind": self.metadata.kind}
        if self.metadata.hidden_states is not None:
            theirs["taps"] = self.metadata.hidden_states.taps
        ours = {**built.settings.model_dump(mode="json"), "taps": list(built.taps)}
        for key in [name for name in ("kind", *ours) if name in theirs and name not in MAY_DIFFER]:
            if ours[key] != theirs[key]:
                raise ConfigError(
                    f"init: {self.folder} is a head with {key} {theirs[key]}, and head.{key} is {ours[key]}: give head what "
                    "the artifact has, or set init to null"
                )
        try:
            head.load_state_dict(read_tensors(self.folder / WEIGHTS_FILE))
        except RuntimeError as error:
            raise ConfigError(
                f"init: {self.folder} has not the weights of the head that `head` describes: {' '.join(str(error).split())}"
            ) from error


def read_initial_head(name: str, target: Target) -> InitialHead:
    """Read a head's artifact from a folder, its training's, or the Hub; of a target of other weights it only warns."""
    folder = locate_artifact(name)
    metadata = read_metadata(folder)
    if metadata.kind == "draft_lm":
        raise InputError(
            f"init: {folder} is a draft LM, and this trains a head; train/distill.py goes on from one by student.init model "
            "and student.path"
        )
    for warning in check_made_for(metadata, target.identity, folder, allow_target_mismatch=True):
        log.warning("%s", warning)
    reduced = metadata.draft_vocabulary == "reduced"
    vocabulary = load_vocabulary(folder, metadata, target.vocab_size) if reduced else None
    return InitialHead(folder=folder, metadata=metadata, vocabulary=vocabulary)
