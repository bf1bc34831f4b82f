"""Stand-ins for the check of a family, for other processes to import; no torch."""

import os
import time

from scripts.lab.models_check.workers import Outcome


def check_planted(name, report, stages=()):
    """Do what the name says: pass, be wrong, be refused, be no decoder, hang, or die, the last two while in `chain`."""
    if name == "encoder":
        report(Outcome("build", "skipped", "an encoder"))
        return
    report(Outcome("load", "started"))
    report(Outcome("load", "ok"))
    report(Outcome("chain", "started"))
    if name == "hangs":
        time.sleep(600)
    if name == "dies":
        os._exit(11)
    report(Outcome("chain", "wrong", "answer 0 departs") if name == "wrong" else Outcome("chain", "ok"))
    for stage in ("batch", "tree") if name == "refused" else ():
        report(Outcome(stage, "refused", "set decode.batch_size to 1"))
    report(Outcome("mtp", "skipped"))
