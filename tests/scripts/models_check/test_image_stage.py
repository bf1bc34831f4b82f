"""The stage of families that read images finds what is right, and what is not."""

from pathlib import Path

import pytest

from heads.inference.kv_cache import RowCache
from scripts.models_check.architectures import tiny_model
from scripts.models_check.cases import Case, Wrong
from scripts.models_check.image_stage import images

pytest.importorskip("PIL")


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "llava"])
def test_a_family_decodes_and_reads_states_with_pictures_as_transformers_does(name: str, tmp_path: Path) -> None:
    images(Case(name=name, model=tiny_model(name), folder=tmp_path))


def test_positions_that_are_not_moved_behind_an_image_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowCache, "moved", lambda cache, positions_BT: positions_BT)
    with pytest.raises(Wrong, match="answer 0 on pictures departs from transformers' generate"):
        images(Case(name="qwen2_5_vl", model=tiny_model("qwen2_5_vl"), folder=tmp_path))
