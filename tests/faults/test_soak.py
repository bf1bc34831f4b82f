"""The soak, one round of each fault, and that it tells a run that ended otherwise."""

import json

import pytest

from configs.runtime.command import DONE
from scripts.lab.fault_injection import rounds as soak_rounds
from scripts.lab.fault_injection.rounds import FAULTS, soak
from scripts.lab.settings import SoakConfig


@pytest.fixture
def config(project, tmp_path):
    """A soak in the project that is there already."""
    (tmp_path / "project").symlink_to(project.folder)
    return SoakConfig(rounds=4, max_kills=1, folder=str(tmp_path), output=str(tmp_path / "soak.json"))


def test_a_round_of_each_kind_of_fault_and_of_each_work_ends_with_the_same_bytes(config, tmp_path, monkeypatch):
    chosen = FAULTS[3:]
    assert {(each.stop, each.damage) for each in chosen} == {(each.stop, each.damage) for each in FAULTS}
    assert {each.work for each in chosen} == set(soak_rounds.WORKS)
    monkeypatch.setattr(soak_rounds, "FAULTS", chosen)
    assert soak(config) == DONE
    results = json.loads((tmp_path / "soak.json").read_text())
    assert results["name"] == "soak"
    assert [row["rounds"] for row in results["rows"]] == [1] * 4
    assert all(row["final_weights_equal"] for row in results["rows"])
    assert list(tmp_path.glob("round-*")) == []
