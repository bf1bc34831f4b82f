"""The stage of families that read images or sounds finds what is right, and what is not."""

from pathlib import Path

import pytest

from heads.frozen.media import MediaReader
from heads.inference.kv_cache import RowCache
from scripts.lab.models_check.architectures import tiny_model
from scripts.lab.models_check.cases import Case, Mismatch
from scripts.lab.models_check.media_stage import media

pytest.importorskip("PIL")


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "llava", "qwen2_audio", "glmasr"])
def test_a_family_decodes_and_reads_states_with_media_as_transformers_does(name: str, tmp_path: Path) -> None:
    media(Case(name=name, model=tiny_model(name), folder=tmp_path))


def test_positions_that_are_not_moved_behind_an_image_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowCache, "moved", lambda cache, positions_BT: positions_BT)
    with pytest.raises(Mismatch, match="answer 0 on images departs from transformers' generate"):
        media(Case(name="qwen2_5_vl", model=tiny_model("qwen2_5_vl"), folder=tmp_path))


def test_sounds_that_are_read_in_the_wrong_order_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined = MediaReader._joined
    monkeypatch.setattr(MediaReader, "_joined", lambda reader, name, parts: joined(reader, name, list(reversed(parts))))
    with pytest.raises(Mismatch, match="answer 0 on audio departs from transformers' generate"):
        media(Case(name="glmasr", model=tiny_model("glmasr"), folder=tmp_path))
