"""What is known of a run before anything is run: the target's config, its prompts, the machine; and what is refused at once."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoTokenizer

from configs.runtime.errors import InputError, first_line
from configs.runtime.loading import as_overrides, load_config
from configs.schema.base import AUTO
from configs.schema.commands.planning import HardwareConfig, PlanConfig, PlanDistillConfig, PlanHeadsConfig, WorkloadConfig
from configs.schema.commands.release import HUB_ID
from configs.schema.commands.running import RunConfig
from configs.schema.data import PromptsConfig
from configs.schema.training import HeadsConfig, training_schema
from distill.generation.bad_rows import BadRow, left_out_by
from distill.generation.prompts import NOT_ENCODED, Prompt, choose_prompts, split_positions, without_duplicates
from distill.generation.sources import read_prompts
from heads.device import CPU, default_device
from heads.formats.exporting.exporter import FORMS, WITHOUT_NORMS, check_norms, form_of
from heads.frozen.identity import PREFIX, locate
from heads.frozen.tokenizer import in_template, load_tokenizer
from heads.frozen.weights import UNREADABLE
from scripts.doctor import BFLOAT16, describe_disk, instructions
from scripts.run.draft_file import Choice, apply, asked_first
from scripts.run.stages import start_of
from train.plan.plan import Fit, Plan, make_plan
from train.resolve import LONGEST, USUAL_LENGTH, USUAL_SHARE

GIB = 2**30
HEAD, DRAFT_LM = "configs/heads/eagle3.yaml", "configs/distill/draft_lm.yaml"
MAX_BAD_SHARE = 0.01  # of a file's rows
NO_LIMIT = 1_000_000  # prompts, of which a run takes what its budget lets it
FEWEST_PROMPTS = 8
SAMPLED_PROMPTS = 1000  # whose lengths are counted
SHORTEST_ANSWER, LONGEST_ANSWER = 64, 512  # tokens: for which a conversation has room, and which are usual
SMALL_STEP = 4  # conversations
FILES = {".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet", ".gz"}
LARGEST_DRY_RUN_VOCABULARY = 6144
SWEPT_FROM_MINUTES = 30
DEFAULT_CONTEXT = 2048  # tokens of a target whose config names none


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known before anything is run."""

    plan: Plan  # of the recipe's training with conversations of a thousand tokens
    num_prompts: int | None  # different ones, at most; None: as many as are asked for
    prompts: Sequence[Prompt]  # of the file, in its order
    on_cpu: bool
    rehearsed: dict[str, Any]  # what the dry run's few answers would make too small, by keys of the recipe

    @property
    def decoded_tokens(self) -> int:
        """Tokens of each answer of the evaluation."""
        return 64 if self.on_cpu else 256

    @property
    def answer_batch_size(self) -> int:
        """Prompts that are answered together."""
        return 48 if self.on_cpu else 64

    @property
    def context(self) -> int:
        """Tokens that the target can read."""
        text_config = self.plan.models.target.config.get_text_config()
        return int(getattr(text_config, "max_position_embeddings", None) or DEFAULT_CONTEXT)

    @property
    def cached(self) -> dict[str, Any]:
        """What a cache of the target's states holds for the recipe, by keys of its config."""
        taps = self.plan.models.taps
        return {"taps": sorted(taps or ()), "max_length": self.plan.config.data.max_length}

    def cost(self, run: RunConfig) -> dict[str, Any]:
        """Return the timing sweep that speeds at other sizes are predicted from, by keys of the evaluation's config.

        There is none without time or a whole target for it, or where all of it was asked for.
        """
        if run.budget_minutes < SWEPT_FROM_MINUTES or run.target.is_split or "cost" in (run.eval or {}):
            return {}
        return {"cost.num_speculative_tokens": 5, "cost.repeats": 2}


# --- the request ------------------------------------------------------------------------------------------------------


def output_of(name: str) -> str:
    """Return the folder of a run on this target, unless another is named."""
    return f"runs/{re.sub(r'[^A-Za-z0-9_.-]+', '-', Path(name.removeprefix(PREFIX)).name.removesuffix('.gguf'))}"


def prompts_of(path: str | None, given: PromptsConfig) -> PromptsConfig:
    """Return where prompts come from: a file, a folder or a data set of the Hub; None: as the config says, else the target."""
    unless_given: dict[str, Any] = {"num_prompts": NO_LIMIT}
    if path is not None:
        unless_given |= {"on_too_long": "skip", "on_bad_row": "skip", "max_bad_share": MAX_BAD_SHARE}
        named = _source_of(path)
    else:
        if "source" not in given.model_fields_set:
            unless_given |= {"temperature": 0.8, "top_p": 1.0}  # drawing from all tokens needs no sorting
        named = {"path": given.path and absolute(given.path)}
    return PromptsConfig.model_validate(unless_given | given.model_dump(exclude_unset=True) | named)


def absolute(name: str) -> str:
    """Return the path of a file or folder from the root, since a job of a cluster begins in another folder; else the name."""
    return str(Path(name).absolute()) if Path(name).exists() else name


def _source_of(path: str) -> dict[str, Any]:
    if Path(path).exists():
        return {"source": "file", "path": absolute(path)}
    if HUB_ID.fullmatch(path) and Path(path).suffix not in FILES:
        return {"source": "dataset", "path": path}
    raise InputError(f"--prompts: {path} is not there; name a file, a folder of files, or a data set of the Hub (owner/name)")


def examine(asked: RunConfig) -> tuple[RunConfig, Facts, list[Choice]]:
    """Return the request with what its target and machine decide, and the facts; an InputError says what cannot be done."""
    on_cpu = default_device().type == CPU.type
    arithmetic = _arithmetic(asked) if on_cpu else []
    number, prompts = count_prompts(asked.stage_prompts)
    template = _template(asked)
    lengths = choose_lengths(apply(asked, template), prompts)
    run = apply(asked, [*template, *asked_first(asked, lengths), *arithmetic])
    plan, recipe = choose_recipe(run)
    _check_room(run, plan)
    choices = asked_first(asked, [*recipe, *template, *lengths, *arithmetic, *_launcher(plan, on_cpu)])
    run = apply(asked, choices)
    facts = Facts(plan=plan, num_prompts=number, prompts=prompts, on_cpu=on_cpu, rehearsed=_rehearsed(run, plan))
    return run, facts, choices


# --- the recipe -------------------------------------------------------------------------------------------------------


def choose_recipe(run: RunConfig) -> tuple[Plan, list[Choice]]:
    """Choose the recipe of a draft that the engine takes for this target, and plan its training."""
    if "recipe" in run.model_fields_set:
        plan, smaller = _fitting(run)
        if run.engine is not None:
            form_of(run.engine, plan.config.head.kind if isinstance(plan.config, PlanHeadsConfig) else "draft_lm")
            check_norms(run.engine, getattr(plan.config, "head", None))
        return plan, [Choice("recipe", run.recipe, "as asked"), *smaller]
    engine = run.engine or "draftsmith"
    if run.engine is not None and "eagle3" not in FORMS[run.engine]:
        why = f"{engine} takes no EAGLE-3"
    else:
        steps = _steps()
        try:
            plan, smaller = _fitting(run, steps)
        except InputError as error:
            why = str(error)
        else:
            embedding, head = plan.models.target.get_input_embeddings(), plan.models.target.get_output_embeddings()
            if type(embedding) is torch.nn.Embedding and type(head) is torch.nn.Linear and head.bias is None:
                recipe = Choice("recipe", HEAD, f"EAGLE-3 has the best acceptance for its size; {engine} serves it")
                depths = Choice("train.head.num_depths", plan.config.num_speculative_tokens, "one per drafted token")
                return plan, [recipe, depths, *_norms(run.engine), *steps, *smaller]
            why = "engines share only weights with a head, and this target's embedding or output head does more"
    draft_lm = Choice("recipe", DRAFT_LM, f"a draft LM: {why}")
    plan, smaller = _fitting(run, [draft_lm])  # which refuses what is no causal LM
    return plan, [draft_lm, *smaller]


def _norms(engine: str | None) -> list[Choice]:
    """Leave EAGLE-3's norms out for an engine that does not know them."""
    if engine not in WITHOUT_NORMS:
        return []
    return [Choice(f"train.head.{name}", False, f"{engine} knows no such norm") for name in ("norm_taps", "norm_feedback")]


def _steps() -> list[Choice]:
    """Take few conversations a step on a processor, where a run has few steps and larger ones are no faster."""
    if hardware().preset != "laptop_cpu":
        return []
    reason = "small batches learn more from little data; no slower on a CPU"
    return [Choice("train.schedule.batch_size", SMALL_STEP, reason)]


def _fitting(run: RunConfig, choices: Sequence[Choice] = ()) -> tuple[Plan, list[Choice]]:
    """Plan the recipe's training; where its batch does not fit into memory, in micro-batches of half the size, or a quarter.

    ZeRO, which needs DeepSpeed and sends what it splits, is taken where no smaller batch fits without it.
    """
    config = plan_config(apply(run, asked_first(run, choices)))
    schedule, plan = config.schedule, _startable(config)
    is_asked = {"schedule.batch_size", "schedule.gradient_accumulation_steps"} & set(run.train or {})
    tried = [(plan, list[Choice]())]
    size, steps = schedule.batch_size, schedule.gradient_accumulation_steps
    while _effort(plan) > 0 and size % 2 == 0 and not is_asked:
        size, steps = size // 2, 2 * steps
        smaller = {"batch_size": size, "gradient_accumulation_steps": steps}
        plan = _startable(config.model_copy(update={"schedule": schedule.model_copy(update=smaller)}))
        reason = f"the recipe's {schedule.batch_size} conversations do not fit into memory at once"
        tried.append((plan, [Choice(f"train.schedule.{key}", value, reason) for key, value in smaller.items()]))
    found, chosen = min(tried, key=lambda each: _effort(each[0]))
    return (plan, []) if found.fitting is None else (found, chosen)


def plan_config(run: RunConfig) -> PlanConfig:
    """Return the plan of the recipe's training on this machine, for conversations of a thousand tokens."""
    given = as_overrides({"target": run.stage_target.model_dump(mode="json"), **start_of(run), **(run.train or {})})
    config: PlanConfig
    if training_schema(run.recipe) is HeadsConfig:
        config = load_config(PlanHeadsConfig, run.recipe, given)
    else:
        config = load_config(PlanDistillConfig, run.recipe, given)
    workload = WorkloadConfig(num_conversations=1000, mean_tokens=1000.0, label_share=0.5)
    return config.model_copy(update={"hardware": hardware(), "workload": workload})


def _startable(config: PlanConfig) -> Plan:
    """Return a plan by the ways that can be started here."""
    plan = make_plan(config)
    has_deepspeed = find_spec("deepspeed") is not None
    return replace(plan, fits=[fit for fit in plan.fits if has_deepspeed or not _is_zero(fit)])


def _effort(plan: Plan) -> int:
    """Return 0 where a plan fits, 1 where it does by ZeRO, 2 where it does not."""
    return 2 if plan.fitting is None else int(_is_zero(plan.fitting))


def _is_zero(fit: Fit) -> bool:
    return fit.engine.recipe.startswith("zero")


def _rehearsed(run: RunConfig, plan: Plan) -> dict[str, Any]:
    """Return a draft vocabulary as large as that of thousands of answers, where the recipe leaves it to them."""
    name = "head" if isinstance(plan.config, PlanHeadsConfig) else "student"
    size = getattr(plan.config, name).draft_vocab_size
    is_open = run.refresh is None and getattr(plan_config(run), name).draft_vocab_size == AUTO
    return {f"{name}.draft_vocab_size": min(LARGEST_DRY_RUN_VOCABULARY, size)} if is_open and size is not None else {}


# --- target, prompts and machine --------------------------------------------------------------------------------------


def _template(run: RunConfig) -> list[Choice]:
    """Choose plain texts for a target whose tokenizer has no chat template."""
    target = run.stage_target
    if target.chat_template is not None or target.name.startswith(PREFIX):
        return []
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            target.name, revision=target.revision, trust_remote_code=target.trust_remote_code
        )
    except (*UNREADABLE, ImportError) as error:
        raise InputError(f"{target.name} has no tokenizer that can be read: {first_line(error)}") from error
    if tokenizer.chat_template is not None:
        return []
    return [Choice("target.chat_template", "plain", "the tokenizer has no chat template: prompts are given as they are")]


def _arithmetic(run: RunConfig) -> list[Choice]:
    """Choose what a processor computes fastest with; one that does not name its instructions counts as having bfloat16's."""
    choices = [Choice("target.forward", "auto", "decodes by draftsmith's own forward where it has one for this family")]
    if (names := instructions()) and not names & BFLOAT16:
        choices.append(Choice("target.dtype", "float32", "this processor has no instructions for bfloat16"))
    return [each for each in choices if each.key.removeprefix("target.") not in run.target.model_fields_set]


def count_prompts(prompts: PromptsConfig) -> tuple[int | None, Sequence[Prompt]]:
    """Return how many different prompts there are at most, None where nothing limits them, and those of a file."""
    if prompts.num_prompts < FEWEST_PROMPTS:
        raise InputError(
            f"prompts.num_prompts must be at least {FEWEST_PROMPTS}, to train and to judge, got {prompts.num_prompts}"
        )
    if prompts.source != "file":
        return None if prompts.num_prompts == NO_LIMIT else prompts.num_prompts, ()
    read = read_prompts(prompts, left_out := left_out_by(prompts))
    left_out.check(len(read))
    if (number := len(set(split_positions(read)))) < FEWEST_PROMPTS:
        raise InputError(
            f"--prompts: {prompts.path} holds {number} different prompts; at least {FEWEST_PROMPTS} are needed to train and to "
            "judge. Leave --prompts out, and the target writes them"
        )
    return min(len(without_duplicates(read)), prompts.num_prompts), read


def choose_lengths(run: RunConfig, prompts: Sequence[Prompt]) -> list[Choice]:
    """Choose how long a conversation may be by the prompts of a file, so that none is answered that would not be trained on.

    A chat template that refuses more of them than `prompts.max_bad_share` is found here, before anything is run.
    """
    if not prompts:
        return []
    tokenizer, left_out = load_tokenizer(locate(run.stage_target), run.stage_target), left_out_by(run.prompts)
    lengths = []
    for prompt in choose_prompts(prompts, SAMPLED_PROMPTS):
        try:
            text = in_template(tokenizer, run.target.name, prompt.messages, tools=prompt.tools)
            lengths.append(len(tokenizer(text, add_special_tokens=False)["input_ids"]))
        except InputError as error:
            left_out.add(BadRow(NOT_ENCODED, str(error), prompt.where))
    left_out.check(len(lengths))
    usual = sorted(lengths)[math.ceil(USUAL_SHARE * len(lengths)) - 1]
    answer = int((run.data or {}).get("answers.max_new_tokens", LONGEST_ANSWER))
    length = min(LONGEST, max(USUAL_LENGTH, usual + answer))
    longest, num_longer = length - SHORTEST_ANSWER, sum(each > length - SHORTEST_ANSWER for each in lengths)
    return [
        Choice("train.data.max_length", length, f"{USUAL_SHARE:.0%} of the prompts have at most {usual} tokens"),
        Choice("prompts.max_prompt_tokens", longest, f"{num_longer} of {len(lengths)} prompts are longer, and left out"),
    ]


def hardware() -> HardwareConfig:
    """Return this machine as a plan sees it: its accelerators, else its processor."""
    device, memory = default_device(), psutil.virtual_memory()
    if device.type == CPU.type:
        return HardwareConfig(memory_gib=memory.available / GIB, host_memory_gib=memory.available / GIB)
    number = torch.accelerator.device_count()
    free, _ = torch.accelerator.get_memory_info(device)
    return HardwareConfig(
        preset="h100_80gb",
        num_accelerators=number,
        accelerators_per_node=number,
        memory_gib=free / GIB,
        host_memory_gib=memory.available / GIB / number,
    )


def _check_room(run: RunConfig, plan: Plan) -> None:
    """Refuse a target whose training does not fit into memory, and a disk that does not hold what is written."""
    if plan.fitting is None:
        least = min(plan.fits, key=lambda fit: fit.num_bytes)
        raise InputError(
            f"training a draft for {run.target.name} needs {least.num_bytes / GIB:.1f} GiB of memory by {least.engine.name}, "
            f"and this machine has {plan.config.hardware.room_gib[0]:.1f} GiB free: take a larger one, or more GPUs; "
            "draftsmith plan says what fits where"
        )
    free, needed = describe_disk(Path(run.output))["free_bytes"], 3 * plan.checkpoint_bytes
    if free < needed:
        raise InputError(
            f"--output: the disk of {run.output} has {free / GIB:.1f} GiB free, and checkpoints take {needed / GIB:.1f} GiB; "
            "free space there, or name a folder on another disk"
        )


def _launcher(plan: Plan, on_cpu: bool) -> list[Choice]:
    """Choose how the processes are started: the simplest way that fits."""
    assert plan.fitting is not None
    engine = plan.fitting.engine
    name = engine.on_cpu if on_cpu and engine.on_cpu else engine.recipe
    what = "the processor" if on_cpu else f"{plan.config.hardware.num_accelerators} accelerators"
    reason = f"the simplest that fits: {plan.fitting.num_bytes / GIB:.1f} GiB"
    choices = [
        Choice("launcher", f"configs/accelerate/{name}.yaml", reason),
        Choice("num_processes", plan.num_processes, f"on {what}"),
    ]
    if engine.group > 1:
        choices.append(Choice("target.shards", engine.group, "one process has no room for the target"))
    if engine.spreads_target:
        choices.append(Choice("target.device_map", "auto", "one accelerator has no room for the target"))
    return choices
