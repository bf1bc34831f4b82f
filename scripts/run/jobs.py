"""A run as a job of a cluster: one node, on which the same command examines, rehearses and runs what was asked."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

from configs.runtime.command import DONE, FAILED
from configs.runtime.files import find_shipped, write_text
from configs.runtime.terminal import say
from configs.schema.commands.running import Where


def submit_job(draft_file: Path, where: Where) -> int:
    """Submit a run to Slurm or Kubernetes where their command is here, and say what to type where it is not."""
    template = find_shipped(f"scripts/cluster/run.{'sbatch' if where == 'slurm' else 'yaml'}")
    path = draft_file.absolute()
    if where == "slurm":
        command = ["sbatch", str(template), str(path)]
    else:
        job = path.with_name("job.yaml")
        name = path.parent.name.lower().replace("_", "-").replace(".", "-")
        write_text(job, template.read_text(encoding="utf-8").replace("${NAME}", name).replace("${DRAFT}", str(path)))
        command = ["kubectl", "apply", "-f", str(job)]
    if shutil.which(command[0]) is None:
        say(f"{command[0]} is not here; where it is:\n\n    {shlex.join(command)}")
        return DONE
    return DONE if subprocess.run(command, check=False).returncode == 0 else FAILED
