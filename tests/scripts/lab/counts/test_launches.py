"""Launches of a decode round and of a training step, held to the numbers that are on record."""

import json

import pytest

from configs.runtime.files import CHECKOUT
from heads.families.eagle3 import Eagle3Layer
from heads.families.registry import FAMILIES
from scripts.lab.counts.launches import Launches, count_launches, count_round, count_walks, tiny_target

RECORD = json.loads((CHECKOUT / "docs" / "results" / "launches.json").read_text(encoding="utf-8"))


def beyond(name: str, launches: Launches) -> dict[str, int]:
    """Return by how much functions make more launches than is on record, where there are more in all."""
    recorded = RECORD["by_place"][name]
    if launches.total <= sum(recorded.values()):
        return {}
    return {place: more for place, count in launches.by_place.items() if (more := count - recorded.get(place, 0)) > 0}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_round_and_a_step_make_no_more_launches_than_on_record(kind, tmp_path):
    found = count_launches(kind, tiny_target(tmp_path))
    assert {name: more for name, launches in found.items() if (more := beyond(name, launches))} == {}


def test_a_launch_that_is_added_is_named_by_the_function_that_makes_it(tmp_path, monkeypatch):
    target, forward = tiny_target(tmp_path), Eagle3Layer.forward
    monkeypatch.setattr(Eagle3Layer, "forward", lambda self, *args: forward(self, *args) + 0)
    found = count_round("eagle3", target, 0.0)
    assert list(beyond("eagle3 greedy draft", found["draft"]).values()) == [5]  # one a draft
    assert beyond("eagle3 greedy rest", found["rest"]) == {}


def test_a_round_walks_no_tree_of_modules_and_sets_no_hooks(tmp_path):
    assert count_walks(tiny_target(tmp_path)) == {"walks": 0, "hooks": 0}
