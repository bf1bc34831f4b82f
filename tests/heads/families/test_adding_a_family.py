"""The example of docs/adding-a-head-family.md, taken out of the document and used from training to decoding."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from pydantic import create_model

from configs.runtime.loading import load_config
from configs.schema import heads as schema
from configs.schema.decoding import DecodeConfig
from configs.schema.training import HeadsConfig
from distill.dataset.batches import ConversationDataset, make_loader
from eval.decoder.decode import generate
from heads.artifact import load_draft
from heads.families.registry import FAMILIES
from tests.support import family_checks as checks
from tests.support.caches import conversation
from train.launch import make_accelerator
from train.loop.loop import train
from train.tasks.head import HeadTask

DOCUMENT = Path(__file__).parents[3] / "docs" / "adding-a-head-family.md"
CONFIG_CLASS, MODULE, RECIPE = re.findall(r"```(?:python|yaml)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


@pytest.fixture
def settings_class(tmp_path, monkeypatch):
    """The example's config class, with its module in the registry."""
    names = dict(vars(schema))
    exec(CONFIG_CLASS, names)
    monkeypatch.setattr(schema, "RecurrentSettings", names["RecurrentSettings"], raising=False)
    path = tmp_path / "recurrent.py"
    path.write_text(MODULE)
    spec = importlib.util.spec_from_file_location("heads.families.recurrent", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(FAMILIES, "recurrent", module.FAMILY)
    return names["RecurrentSettings"]


def test_it_trains_and_its_artifact_decodes_as_the_target_alone(settings_class, tmp_path, tiny_llama, as_target):
    target = as_target(tiny_llama(seed=2, spread=4.0, dtype=torch.float32))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    config_class = create_model("ExampleConfig", __base__=HeadsConfig, head=(settings_class, ...))
    short = ["schedule.epochs=6", "schedule.batch_size=4", "schedule.trackers=[]", "schedule.mixed_precision=no"]
    short.append("optimizer.learning_rate=0.01")
    config = load_config(config_class, tmp_path / "recipe.yaml", [f"output={tmp_path / 'run'}", *short])
    prompts = [[7 + number, 12, 3, 40 + number] for number in range(8)]
    answers = generate(target, prompts, DecodeConfig(num_speculative_tokens=0, max_new_tokens=12))
    rows = [conversation(*each, f"p{number}") for number, each in enumerate(zip(prompts, answers, strict=True))]
    accelerator = make_accelerator(config.schedule, tmp_path / "run")
    task = HeadTask(config, target, rows, rows[:2], accelerator)
    plain_loss, losses = task.loss, []

    def noted_loss(*arguments):
        result = plain_loss(*arguments)
        losses.append(result.loss.item())
        return result

    task.loss = noted_loss
    loader = make_loader(ConversationDataset(rows, 64), config.schedule.batch_size, seed=0)
    train(task, loader, config, accelerator)
    assert losses[-1] < losses[0] / 2
    loaded = load_draft(tmp_path / "run" / "artifact", target.identity, target.model)
    assert loaded.metadata.kind == "recurrent"
    settings = DecodeConfig(num_speculative_tokens=3, max_new_tokens=16, batch_size=2)
    plain = generate(target, checks.PROMPTS, settings.model_copy(update={"num_speculative_tokens": 0}))
    assert generate(target, checks.PROMPTS, settings, loaded.proposer) == plain


def test_it_passes_what_every_family_has_to_show(settings_class, as_target):
    model = checks.tiny_target("qwen3")
    head = checks.build(settings_class(kind="recurrent"), model)
    checks.assert_drafts_as_trained(head, model)
    checks.assert_documents_are_apart(head, model)
    checks.assert_greedy_output_is_plain(head, as_target(model))
