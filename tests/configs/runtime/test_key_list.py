"""Every key with its type, default and meaning; a config printed as YAML that loads as the same."""

import pytest

from configs.runtime.command import run_command
from configs.runtime.key_list import keys_of
from configs.runtime.loading import load_config
from configs.schema.data import DataConfig
from configs.schema.evaluation import EvalConfig, GateConfig
from configs.schema.training import DistillConfig, HeadsConfig


def run(schema, *argv, **options):
    return run_command(schema, lambda *_: pytest.fail("the command ran"), description="", argv=list(argv), **options)


def test_a_key_has_its_type_default_and_the_comment_beside_it():
    keys = {(key.path, key.kind): key for key in keys_of(HeadsConfig)}
    depths = keys["head.num_depths", "kind: mtp"]
    assert (depths.type, depths.default, depths.sentence) == ("integer >= 1", "4", "depths trained")
    assert keys["head.concat_order", "kind: mtp"].type == "embedding_first | hidden_first"
    assert keys["target.revision", ""].type == "text | null"


def test_the_default_is_what_the_section_above_sets():
    [key] = [key for key in keys_of(DistillConfig) if key.path == "held_out.decode.max_new_tokens"]
    assert key.default == str(DistillConfig().held_out.decode.max_new_tokens)


@pytest.mark.parametrize("schema", [DataConfig, DistillConfig, HeadsConfig, EvalConfig, GateConfig])
def test_every_key_has_a_sentence(schema):
    assert [key.path for key in keys_of(schema) if not key.sentence] == []


def test_keys_are_printed_before_missing_arguments_are_complained_of(capsys):
    with pytest.raises(SystemExit) as end:
        run(GateConfig, "--keys", "rules.*.m", add_arguments=lambda parser: parser.add_argument("report"))
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "rules.*.min: number | null = null\n" in printed
    assert "suite_sha256" not in printed


def test_a_printed_config_loads_as_the_same(capsys, tmp_path):
    assert run(EvalConfig, "--print-config", "--set", "decode.seed=3", "decode.temperature=0.5") == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    config = load_config(EvalConfig, tmp_path / "printed.yaml")
    assert config == load_config(EvalConfig, None, ["decode.seed=3", "decode.temperature=0.5"])
    assert (config.decode.seed, config.decode.temperature) == (3, 0.5)
