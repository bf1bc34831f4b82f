"""`draftsmith doctor`: devices, memory, disk, versions, engines, the Hub's login, and what is missing for what.

Asks no network, unless told to (--online), and writes nothing. Ends with 0, or with 1 where even the embedded target cannot be
trained for: torch is broken, memory or disk too small.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.runtime.command import DONE, GATE_FAILED, Parser, exit_code
from configs.runtime.files import downloads_folder
from configs.runtime.redaction import mask_secrets
from configs.runtime.terminal import say
from scripts.doctor.machine import describe_accelerators, describe_disk, describe_machine
from scripts.doctor.needs import GB, GIB, Missing, missing_for_what
from scripts.doctor.software import ENGINES, compare_versions, describe_embedded, describe_hub, find_engines, find_tools


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0], epilog="It exits with 1 where nothing can be trained.")
    parser.add_argument("--json", action="store_true", help="print all that was found as JSON")
    parser.add_argument("--online", action="store_true", help="ask the Hub whose token it is")

    def run() -> int:
        arguments = parser.parse_args(argv)
        found = examine(arguments.online)
        missing = missing_for_what(found)
        if arguments.json:
            say(json.dumps({**mask_secrets(found), "missing": [asdict(each) for each in missing]}, indent=2))
        else:
            say("\n".join(page(found, missing)))
        return GATE_FAILED if any(each.stops_training for each in missing) else DONE

    return exit_code(run)


def examine(online: bool) -> dict[str, Any]:
    """Return all that can be found out about this machine, as JSON values."""
    hub = describe_hub(online)
    folders = {"runs": "runs", "downloads": downloads_folder(), "hub": hub["cache"]}
    return {
        "machine": describe_machine(),
        "disks": {name: describe_disk(Path(folder)) for name, folder in folders.items() if folder is not None},
        "accelerators": describe_accelerators(),
        "versions": compare_versions(),
        "tools": find_tools(),
        "engines": find_engines(),
        "hub": hub,
        "embedded": describe_embedded(),
    }


def page(found: dict[str, Any], missing: Sequence[Missing]) -> Iterator[str]:
    """Yield the lines that a person reads."""
    sections = {
        "this machine": _machine(found["machine"], found["disks"]),
        "accelerators": _accelerators(found),
        "versions": [*found["versions"]["installed"].items()],
        "tools": [(name, found["tools"][name] or "-") for name in found["tools"]],
        "engines": [(engine.title, _engine(found["engines"][name])) for name, engine in ENGINES.items()],
        "models": _models(found["hub"], found["embedded"]),
    }
    for title, rows in sections.items():
        yield title
        yield from (f"  {name:15}  {value}" for name, value in rows)
    yield "missing, and for what"
    yield from (f"  {'!' if each.stops_training else '-'} {each.what}" for each in missing)


def _machine(machine: dict[str, Any], disks: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    limit = machine["cores_limit"]
    cores = f"{machine['cores']} cores" + ("" if limit is None else f", {limit:g} of them by the container's limit")
    own = {True: ", bfloat16", False: ", no bfloat16", None: ""}[machine["bfloat16"]]
    yield "processor", f"{machine['cpu']}, {cores}; {machine['vectors'] or 'instructions unknown'}{own}"
    limit = machine["memory_limit_bytes"]
    total = machine["memory_bytes"] if limit is None else limit
    yield (
        "memory",
        f"{machine['memory_free_bytes'] / GIB:.1f} GiB free of {total / GIB:.1f}"
        + ("" if limit is None else ", the container's limit"),
    )
    for name, disk in disks.items():
        closed = "" if disk["writable"] else ", which cannot be written"
        yield f"disk, {name}", f"{disk['free_bytes'] / GB:.0f} GB free for {disk['folder']}{closed}"


def _accelerators(found: dict[str, Any]) -> list[tuple[str, str]]:
    gpus = [
        (each["name"], f"{(each['memory_bytes'] or 0) / GIB:.0f} GiB, driver {each['driver']}, by nvidia-smi")
        for each in found["machine"]["gpus"]
    ]
    devices = [
        (
            each["name"],
            ("computes" if each["error"] is None else "does not compute")
            + ("" if each["free_bytes"] is None else f", {each['free_bytes'] / GIB:.1f} GiB free")
            + ", by torch",
        )
        for each in found["accelerators"]["devices"]
    ]
    return [*gpus, *devices] or [("none", "torch computes on the CPU" if found["accelerators"]["error"] is None else "")]


def _engine(engine: dict[str, str | None] | None) -> str:
    return "-" if engine is None else f"{engine['version'] or 'version unknown'}, {engine['place']}"


def _models(hub: dict[str, Any], embedded: dict[str, Any]) -> Iterator[tuple[str, str]]:
    login = f"logged in as {hub['user']}" if hub["user"] else "a token is stored" if hub["logged_in"] else "no token"
    yield "the Hub", f"{login}, {hub['endpoint']}{', offline' if hub['offline'] else ''}"
    yield "embedded", embedded["folder"] if embedded["there"] else f"fetched into {embedded['folder']} when it is first used"


if __name__ == "__main__":
    sys.exit(main())
