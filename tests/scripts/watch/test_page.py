"""The page of a run: in Chromium it follows the run until that is over, it escapes what files say, and leads to the results."""

from __future__ import annotations

import re
import shutil
import threading
import time
from functools import partial
from html import escape, unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from configs.runtime.files import folder_lock
from scripts.watch.page import page_kept, thinned, write_page
from scripts.watch.state import Point
from tests.support.browser import needs_browser, open_page

ATTACK = """<script>document.title = "taken over"</script><img src="x" onerror="document.title = 'taken over'">"""


def written(run):
    write_page(run.folder)
    return (run.folder / "index.html").read_text(encoding="utf-8")


@pytest.fixture
def served(run):
    """The address of a run's page, and what happens to the run before each request for it, as the runner would write it."""
    before = []

    class Pages(SimpleHTTPRequestHandler):
        def do_GET(self):
            if self.path.endswith(".html"):
                del self.headers["If-Modified-Since"]  # of a whole second, within which more than one page is written
                before.pop(0)()
                write_page(run.folder)
            super().do_GET()

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Pages, directory=str(run.folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/index.html", before
    server.shutdown()
    thread.join()
    server.server_close()


@needs_browser
def test_a_browser_follows_a_run_until_it_has_ended(run, served, tmp_path):
    def end():
        for name in ("train", "eval", "gate", "export"):
            run.end(name)

    def never():
        raise AssertionError("the page of a run that has ended loads itself again")

    address, before = served
    before += 5 * [lambda: None]
    dom, _ = open_page(address, tmp_path / "profile", seconds=1)
    assert "<h1>train: step 20</h1>" in dom
    before[:] = [lambda: run.train_some({10: 4.0, 30: 2.0}, {30: 2.75}), end, never]
    dom, console = open_page(address, tmp_path / "profile", seconds=60)
    assert before == [never]  # it loaded itself twice: while the run went on, and as it had ended
    assert re.search(r"<h1>Ended after \d\.\d minutes</h1>", dom)
    assert "2.75" in dom
    assert dom.count("<svg") == 1
    assert console == []


@needs_browser
def test_the_page_of_a_run_that_was_killed_says_so_by_itself(run, tmp_path):
    page = written(run)
    for address, ago, says in (("new.html", 0, False), ("old.html", 725, True)):
        (tmp_path / address).write_text(re.sub(r"(Date.now\(\) / 1000 - )(\d+)", rf"\g<1>-{ago} - \2", page), encoding="utf-8")
        dom, _ = open_page((tmp_path / address).as_uri(), tmp_path / "profile")
        assert ("No sign of life for 12 minutes" in dom) == says


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_hostile_files_do_nothing_in_a_browser_and_nothing_leaves_the_window(run, tmp_path, width):
    run.show(ATTACK)
    (run.folder / "draft.yaml").write_text(f"target: {{name: {ATTACK!r}}}\n")
    probe = "<script>document.body.dataset.over = document.documentElement.scrollWidth - innerWidth</script>"
    with run.progress("train", ATTACK, 100, "steps"):
        page = run.folder / "page.html"
        page.write_text(written(run).replace("</body>", f"{probe}</body>"), encoding="utf-8")
    dom, console = open_page(page.as_uri(), tmp_path / "profile", width)
    assert unescape(re.search(r"<title>(.*?)</title>", dom, re.DOTALL)[1]) != "taken over"
    assert dom.count(escape(ATTACK, quote=False)) >= 2
    assert int(re.search(r'data-over="(-?\d+)"', dom)[1]) <= 0
    assert console == []


def test_the_page_of_a_run_that_has_ended_has_the_verdict_and_leads_to_the_results(run, measured):
    shutil.copytree(measured / "evaluation", run.folder / "eval")
    (run.folder / "eval" / "report.html").write_text("")
    served = run.folder / "export" / "vllm"
    served.mkdir(parents=True)
    (served / "serve.txt").write_text("vllm serve")
    for name in ("train", "eval", "gate", "export"):
        run.end(name)
    page = written(run)
    assert {"eval/report.html", "eval/gate.md", "export/vllm/serve.txt", "draft.yaml"} <= set(
        re.findall('href="([^"#]+)"', page)
    )
    assert re.search(r"<h1>Pass: \d\.\d\d tokens per target step, \d\.\d\d× the speed of plain decoding</h1>", page)
    for name in ("Verdict of the gate", "Tokens per target step", "Decode speedup"):
        assert name in page
    assert "http-equiv" not in page


def test_a_long_curve_is_drawn_by_means_of_neighbours():
    points = tuple(Point(step, step % 2) for step in range(10_000))
    assert len(thinned(points)) <= 400
    assert {point.value for point in thinned(points)} <= {0.48, 0.52, 0.5}
    assert thinned(points)[-1].step == 9_999
    assert thinned(points[:9]) == list(points[:9])


def test_the_page_is_kept_while_the_run_goes_on_and_once_more_at_its_end(run, tmp_path):
    page = run.folder / "index.html"
    with folder_lock(run.folder, beside=True), page_kept(run.folder, seconds=0.01):
        while not page.exists() or "train: step 20" not in page.read_text():
            time.sleep(0.01)
        run.end("train")
    assert "Not running; the same command goes on" in page.read_text()  # as after `draftsmith train draft.yaml`
    assert "http-equiv" not in page.read_text()
    with page_kept(tmp_path / "refused"):
        pass
    assert not (tmp_path / "refused").exists()


def test_a_page_that_cannot_be_written_stops_nothing(run, monkeypatch):
    (run.folder / "index.html").mkdir()
    write_page(run.folder)
    monkeypatch.setattr("scripts.watch.page.read_run", lambda folder: 1 / 0)
    with page_kept(run.folder):
        pass
