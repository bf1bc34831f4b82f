"""What accelerate is told from outside of the recipe is refused, or overridden by a line that names the variable."""

import os

import pytest

from configs.runtime.errors import ConfigError
from configs.runtime.files import CHECKOUT
from tests.support.training_runs import distill_config
from train.loop.surroundings import OVERRIDDEN, REFUSED, REFUSED_OF_FSDP, check_surroundings

FSDP = {"ACCELERATE_USE_FSDP": "true"}
SAID = {"MIXED_PRECISION": "fp16", "GRADIENT_ACCUMULATION_STEPS": "4", "GRADIENT_CLIPPING": "0.5", "DYNAMO_BACKEND": "INDUCTOR"}
OF_THE_LAUNCHER = {
    "MIXED_PRECISION": "no",
    "GRADIENT_ACCUMULATION_STEPS": "1",
    "GRADIENT_CLIPPING": "1.0",
    "DYNAMO_BACKEND": "NO",
}


@pytest.fixture
def check(tmp_path, monkeypatch, caplog):
    """A function that checks a recipe under these variables, and returns what is said."""
    for name in [*os.environ]:
        if name.startswith(("ACCELERATE_", "FSDP_", "MASTER_ADDR", "WORLD_SIZE")):
            monkeypatch.delenv(name)

    def run(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        check_surroundings(distill_config(tmp_path))
        return caplog.text

    return run


@pytest.mark.parametrize(
    ("variables", "key"),
    [
        (FSDP | {"FSDP_VERSION": "1"}, "fsdp_version"),
        *((FSDP | {"FSDP_VERSION": "2", f"FSDP_{name.upper()}": "true"}, f"fsdp_{name}") for name in REFUSED_OF_FSDP),
        *(({f"ACCELERATE_{name}": "true"}, section) for name, section in REFUSED.items()),
    ],
)
def test_what_no_engine_does_is_refused(check, variables, key):
    with pytest.raises(ConfigError, match=key):
        check(variables)


@pytest.mark.parametrize("name", SAID)
def test_what_the_recipe_overrides_is_named_unless_it_says_the_same(check, name):
    assert check({f"ACCELERATE_{each}": value for each, value in OF_THE_LAUNCHER.items()}) == ""
    assert f"ACCELERATE_{name}={SAID[name]}" in check({f"ACCELERATE_{name}": SAID[name]})


def test_processes_that_the_launcher_did_not_start_are_missed(check):
    assert "num_processes" in check({"MASTER_ADDR": "127.0.0.1"})


def test_every_variable_is_in_the_documents_table():
    text = (CHECKOUT / "docs" / "training.md").read_text()
    assert [name for name in [*OVERRIDDEN, *REFUSED] if f"`{name}`" not in text] == []
