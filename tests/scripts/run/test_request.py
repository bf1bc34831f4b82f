"""What a run finds out of a target's config and a machine's memory."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.runtime.errors import InputError
from configs.schema.commands.planning import HardwareConfig
from configs.schema.commands.running import RunConfig
from configs.schema.data import PromptsConfig
from configs.schema.target import TargetConfig
from scripts.run import request


def planned(monkeypatch, name, engine="vllm", **hardware):
    gpus = HardwareConfig(preset="h100_80gb", **hardware)
    monkeypatch.setattr(request, "hardware", lambda: gpus)
    return request.choose_recipe(RunConfig(target=TargetConfig(name=name), engine=engine))


@pytest.mark.parametrize(
    ("memory_gib", "deepspeed", "engine", "batch_size"),
    [
        (56.0, True, "one_gpu", 4),  # by ZeRO-3 with offloading all 8 would fit
        (40.0, True, "zero3_offload", 2),
        (40.0, False, None, None),
    ],
)
def test_zero_is_taken_where_no_smaller_batch_fits_without_it_and_deepspeed_is_there(
    monkeypatch, memory_gib, deepspeed, engine, batch_size
):
    monkeypatch.setattr(request, "find_spec", lambda name: deepspeed or None)
    plan, choices = planned(monkeypatch, "configs/plan/llama_8b", engine="transformers", memory_gib=memory_gib)
    assert (plan.fitting and plan.fitting.engine.recipe) == engine
    assert {each.key: each.value for each in choices}.get("train.schedule.batch_size") == batch_size


@pytest.mark.parametrize(
    ("engine", "recipe", "reason"),
    [("vllm", request.HEAD, "EAGLE-3"), ("transformers", request.DRAFT_LM, "transformers takes no EAGLE-3")],
)
def test_a_recipe_that_nobody_asked_for_is_chosen_for_the_engine(engine, recipe, reason, model):
    chosen, _, choices = request.examine(RunConfig(target=TargetConfig(name=str(model)), engine=engine))
    assert chosen.recipe == recipe
    assert any(each.key == "recipe" and reason in each.reason for each in choices)
    assert any(each.key == "train.schedule.batch_size" for each in choices) == (recipe == request.HEAD)  # on a processor


@pytest.mark.parametrize(("engine", "left_out"), [("vllm", set()), ("openvino", {"norm_taps", "norm_feedback"})])
def test_an_engine_that_knows_no_norms_gets_a_head_without_them(engine, left_out, model):
    _, _, choices = request.examine(RunConfig(target=TargetConfig(name=str(model)), engine=engine))
    assert {each.key.removeprefix("train.head.") for each in choices if each.value is False} == left_out


def test_the_plan_and_the_tokenizer_are_those_of_the_revision_and_of_code_that_is_trusted(monkeypatch):
    target = TargetConfig(name="ann/target", revision="abc", trust_remote_code=True, attention="eager")
    assert request.plan_config(RunConfig(target=target)).target == target
    asked = []

    def from_pretrained(name, **options):
        asked.append((name, options))
        return SimpleNamespace(chat_template="")

    monkeypatch.setattr(request.AutoTokenizer, "from_pretrained", from_pretrained)
    assert request._template(RunConfig(target=target)) == []
    assert asked == [("ann/target", {"revision": "abc", "trust_remote_code": True})]


def test_a_named_recipe_with_norms_is_refused_for_such_an_engine_before_anything_is_run(model):
    with pytest.raises(InputError, match=r"llama\.cpp does not: train it with head\.norm_taps=false"):
        request.examine(RunConfig(target=TargetConfig(name=str(model)), engine="gguf", recipe=request.HEAD))


def test_a_file_of_prompts_is_found_from_any_folder_also_where_a_config_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("w1 w2\n")
    named = request.prompts_of(None, PromptsConfig(source="file", path="prompts.txt"))
    assert named.path == request.prompts_of("prompts.txt", PromptsConfig()).path == str(tmp_path / "prompts.txt")


def test_different_prompts_of_a_file_are_counted_and_too_few_are_refused(tmp_path):
    path = tmp_path / "few.txt"
    path.write_text("".join(f"w1 w2 {number}\n" for number in range(12)) + "w1 w2 0\n")
    named = request.prompts_of(str(path), PromptsConfig())
    assert request.count_prompts(named)[0] == 12
    assert request.count_prompts(named.model_copy(update={"num_prompts": 10}))[0] == 10
    path.write_text("".join(f"w1 w2 {number}\n" for number in range(5)))
    with pytest.raises(InputError, match="--prompts"):
        request.count_prompts(named)


def test_lengths_are_those_of_the_prompts_and_a_file_that_the_template_refuses_is_refused_first(model, tmp_path):
    path, target = tmp_path / "long.txt", TargetConfig(name=str(model), chat_template="plain")
    path.write_text("".join(f"{'w1 ' * (3000 if number < 10 else 9)} w{number}\n" for number in range(90)))
    run = RunConfig(target=target, prompts=request.prompts_of(str(path), PromptsConfig()))
    chosen = {each.key: each.value for each in request.choose_lengths(run, request.count_prompts(run.prompts)[1])}
    length = chosen["train.data.max_length"]
    assert (3500 < length < 3530, chosen["prompts.max_prompt_tokens"]) == (True, length - 64)
    refusing = tmp_path / "refusing.jinja"
    refusing.write_text("{{ messages[0].content if 'w7' not in messages[0].content else raise_exception('w7') }}")
    run = run.model_copy(update={"target": target.model_copy(update={"chat_template": str(refusing)})})
    with pytest.raises(InputError, match="max_bad_share"):
        request.choose_lengths(run, request.count_prompts(run.prompts)[1])
