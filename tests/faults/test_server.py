"""A data set by a server whose making is killed: no answer is lost with the process."""

import os
import signal

import pytest

from configs.runtime import files
from configs.runtime.command import DONE
from configs.schema.data import DataConfig
from configs.schema.target import TargetConfig
from distill.generation.make_dataset import make_dataset
from distill.generation.server_answers import ServerAnswerJob
from heads.frozen.loading import load_target
from tests.faults.conftest import kill_at_call, start_pair
from tests.faults.test_making import made
from tests.support.fake_server import Api, serving


@pytest.fixture
def api(project):
    with serving(Api(load_target(TargetConfig(**project.target)))) as served:
        yield served


@pytest.fixture
def served_data(project, tmp_path, api):
    """A function that gives the config of a data set by the server."""

    def make(name, **settings):
        plain = project.data(tmp_path / name).model_dump()
        server = {"url": api.url, "model": "tiny", "concurrency": 4, "retries": 0, **settings}
        parts = {"answers": plain["answers"] | {"written_by": "server"}, "prompts": plain["prompts"] | {"num_prompts": 16}}
        return DataConfig.model_validate(plain | parts | {"server": server})

    return make


def answers_asked(api):
    return len([body for body in api.asked if "seed" in body])


def test_data_whose_asking_was_killed_again_and_again_ends_with_the_same_bytes(served_data, start, api, tmp_path):
    assert start(make_dataset, served_data("whole")).end() == DONE
    asked = answers_asked(api)
    for plant in (
        kill_at_call(ServerAnswerJob, "_answer", 6),
        kill_at_call(os, "fsync", 5),
        kill_at_call(files, "sync_folder", 1),
    ):
        killed = start(make_dataset, served_data("data"), before=plant)
        assert killed.end() == -signal.SIGKILL, killed.said
        assert not (tmp_path / "data" / "manifest.json").exists()
    resumed = start_pair(start, make_dataset, served_data("data"))
    assert [child.end() for child in resumed] == [DONE, DONE], resumed[0].said
    assert made(tmp_path / "data") == made(tmp_path / "whole")
    # Of each killed run only the answers under way were asked for again.
    assert answers_asked(api) <= 2 * asked + 2 * (4 + 1)
