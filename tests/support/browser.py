"""Pages in Chromium, where it is on the PATH (Debian's package `chromium`)."""

import shutil
import subprocess

import pytest

CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH")


def open_page(address, profile, width=1280, seconds=2):
    """Open a page with no network but this machine's; give its DOM after so many seconds, and what the console said.

    The seconds are those of the page's own clock, which runs ahead where nothing is loaded.
    """
    options = "headless no-sandbox disable-gpu no-first-run disable-dev-shm-usage disable-background-networking dump-dom"
    command = [CHROMIUM, *(f"--{option}" for option in options.split())]
    command += [f"--user-data-dir={profile}", f"--window-size={width},1000", f"--virtual-time-budget={1000 * seconds}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--enable-logging=stderr", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
