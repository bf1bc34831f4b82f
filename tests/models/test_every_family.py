"""Every family of transformers, tiny, through every stage: what is computed is right, or refused in a sentence.

`pytest -m models tests/models` (12 minutes); MODELS_RESULTS=docs/results/models.json also writes what docs/models.md shows.
"""

import traceback
import warnings

import pytest
import torch

from configs.runtime.errors import InputError, first_line
from tests.models.cases import Mismatch, NotApplicable, open_case
from tests.models.stages import STAGES
from tests.support.architectures import family_of, names, not_a_decoder


@pytest.mark.models
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", names())
def test_a_family_is_right_or_refused_in_every_stage(name, tmp_path, record_property):
    warnings.simplefilter("ignore")  # and transformers' remarks on tiny configs
    torch.set_num_threads(1)
    if (reason := not_a_decoder(family_of(name))) is not None:
        record_property("not_built", reason)
        pytest.skip(reason)
    try:
        case = open_case(name, tmp_path)
    except Exception as error:  # whatever transformers raises
        reason = f"transformers cannot build it tiny, or generate with it alone: {type(error).__name__}: {first_line(error)}"
        record_property("not_built", reason)
        pytest.skip(reason)
    failures = []
    for stage, run in STAGES.items():
        if case.loaded is None and stage != "load":
            break
        outcome, sentence = outcome_of(run, case)
        record_property(stage, outcome)
        if sentence:
            record_property("finding", (stage, sentence))
        if outcome in ("wrong", "error"):
            failures.append(f"{stage}: {outcome}: {sentence}")
    assert not failures, "\n".join(failures)


def outcome_of(run, case):
    """Run a stage; return how it ended, and why in a sentence."""
    try:
        run(case)
    except NotApplicable:
        return None, ""
    except Mismatch as wrong:
        return "wrong", str(wrong)
    except InputError as refusal:
        return "refused", str(refusal).replace(str(case.folder), "FOLDER")
    except Exception as error:  # a traceback is what this check is to find
        traceback.print_exc()
        return "error", f"{type(error).__name__}: {first_line(error)}"
    return "ok", ""
