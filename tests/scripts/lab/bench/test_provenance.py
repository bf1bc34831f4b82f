"""What lies in docs/results is of one commit of a clean tree and of one machine, and so is what was trained for it."""

import json
import subprocess

import pytest

from configs.runtime import run_record
from configs.runtime.command import BAD_INPUT
from configs.runtime.errors import InputError
from scripts.lab.bench import provenance
from scripts.lab.bench.harness import write_results
from scripts.lab.bench.provenance import check_place, check_same_origin, check_trained_here
from scripts.lab.benchmark import run
from scripts.lab.settings import SoakConfig


def git(folder, *arguments):
    identity = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.com"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with one commit, in which this process begins anew."""
    folder = tmp_path / "checkout"
    (folder / "docs" / "results").mkdir(parents=True)
    (folder / "heads").mkdir()
    (folder / "heads" / "head.py").write_text("one\n")
    git(tmp_path, "init", "-q", str(folder))
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    for function, name in ((run_record.describe_git, "describe_git"), (provenance.changed_files, "changed_files")):
        monkeypatch.setattr(provenance, name, lambda *given, function=function: function(*given, root=folder))
    monkeypatch.setattr(provenance, "RESULTS", folder / "docs" / "results")
    monkeypatch.chdir(folder)
    provenance.describe_origin.cache_clear()
    yield folder
    provenance.describe_origin.cache_clear()


def write(path):
    write_results(path, "soak", SoakConfig(), rows=[{"fault": "kill"}], ratios={})


def test_a_dirty_tree_is_refused_before_anything_runs_and_may_write_elsewhere(checkout, capsys):
    (checkout / "heads" / "head.py").write_text("two\n")
    (checkout / "heads" / "new.py").touch()
    assert run(["soak", "--set", "output=docs/results/soak.json"]) == BAD_INPUT
    said = capsys.readouterr().err
    assert "these differ from commit" in said
    assert "heads/head.py, heads/new.py; commit first, or set output to another file" in said
    write("elsewhere.json")
    assert json.loads((checkout / "elsewhere.json").read_text())["git"]["dirty"] is True


def test_code_that_changes_while_it_is_measured_keeps_the_results_out(checkout):
    path = checkout / "docs" / "results" / "soak.json"
    check_place(path)
    write(path)
    assert json.loads(path.read_text())["git"] == {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": False}
    path.unlink()
    (checkout / "heads" / "head.py").write_text("two\n")
    git(checkout, "commit", "-qam", "other code")
    with pytest.raises(InputError, match=r"these differ from commit .*: heads/head.py; .*; the results are in runs/soak.json"):
        write(path)
    assert not path.exists()
    assert json.loads((checkout / "runs" / "soak.json").read_text())["rows"] == [{"fault": "kill"}]


def test_a_draft_of_other_code_is_refused_and_one_of_the_same_code_is_kept(checkout):
    output, artifact = checkout / "docs" / "results" / "heads.json", checkout / "runs" / "artifact"
    artifact.mkdir(parents=True)

    def trained(commit, dirty):
        (artifact / "draftsmith.json").write_text(json.dumps({"provenance": {"git": {"commit": commit, "dirty": dirty}}}))

    trained(git(checkout, "rev-parse", "HEAD"), False)
    (checkout / "scripts.py").touch()
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "what trains nothing")
    check_trained_here([artifact], output)
    (checkout / "heads" / "head.py").write_text("two\n")
    git(checkout, "commit", "-qam", "other code")
    with pytest.raises(InputError, match=r"was trained by commit \w{12}; since then changed: heads/head.py; remove it"):
        check_trained_here([artifact], output)
    check_trained_here([artifact], checkout / "heads.json")


def test_results_of_other_code_or_another_machine_are_refused(checkout):
    path = checkout / "docs" / "results" / "scale.json"
    write(path)
    content = json.loads(path.read_text())
    check_same_origin(content, path)
    with pytest.raises(InputError, match=r"scale.json is of other hardware than this run's; make it anew first"):
        check_same_origin(content | {"hardware": {"cpu": "another"}}, path)
    (checkout / "heads" / "head.py").write_text("two\n")
    with pytest.raises(InputError, match=r"scale.json is of other code than this run's"):
        check_same_origin(content, path)
