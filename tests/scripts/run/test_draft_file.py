"""What a `draft.yaml` keeps of a request."""

import pytest

from configs.runtime.loading import load_config
from configs.schema.commands.running import RunConfig
from scripts.run.draft_file import write_draft_file


@pytest.mark.parametrize("asked", [{}, {"cache": None}, {"cache": {}}])
def test_a_cache_that_was_asked_for_or_forbidden_is_still_so_when_the_file_is_read(asked, tmp_path):
    kept = load_config(RunConfig, write_draft_file(RunConfig(output=str(tmp_path), **asked)))
    assert ("cache" in kept.model_fields_set, kept.cache) == ("cache" in asked, asked.get("cache"))
