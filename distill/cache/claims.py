"""Which process makes which shard: each claims one by a file of its own, so that nobody waits for anybody else.

A claim that its process did not follow up, because it died, is taken over: at once where that process ran on this machine,
else after `claim_seconds`. Shards are the same whoever makes them, so that two at the same one (clocks that differ, a store
that lets both claim) cost time and nothing else.
"""

from __future__ import annotations

import json
import logging
import platform
import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from distill.cache.format import CLAIM, SHARD
from distill.cache.storage import Folder

logger = logging.getLogger("draftsmith")

POLL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Claims:
    """The shards of a job that this process makes: those that it was first to claim."""

    folder: Folder
    num_shards: int
    claim_seconds: float
    start: int  # the first one it asks for; those after it follow, then those before

    def missing(self) -> list[int]:
        names = self.folder.names()
        return [number for number in range(self.num_shards) if SHARD.format(number=number) not in names]

    def shards(self) -> Iterator[int]:
        """Yield shards to be made now, until all of them are there; each stays claimed until `release`."""
        yielded: set[int] = set()  # which the caller may still be writing
        while missing := deque(number for number in self.missing() if number not in yielded):
            missing.rotate(-sum(number < self.start for number in missing))
            all_claimed = True
            while missing:
                number = missing.popleft()
                if not self._claim(number):
                    missing.rotate(-random.randrange(max(1, len(missing))))  # away from those who ask in the same order
                elif self.folder.has(SHARD.format(number=number)):  # it was finished since the folder was listed
                    self.release(number)
                else:
                    yielded.add(number)
                    yield number
                    all_claimed = False
            if all_claimed:
                time.sleep(POLL_SECONDS)

    def release(self, number: int) -> None:
        """Give up the claim to a shard, which is there now."""
        self.folder.delete([CLAIM.format(number=number)])

    def _claim(self, number: int) -> bool:
        file = CLAIM.format(number=number)
        own = psutil.Process()
        about = {"host": platform.node(), "process": own.pid, "started": own.create_time(), "time": time.time()}
        claim = json.dumps(about).encode()
        if self.folder.create(file, claim):
            return True
        if (content := self.folder.read(file)) is None or self.is_alive(content):
            return False
        logger.warning(
            "shard %d of %s was begun by a process that has ended or is too slow; it is started again", number, self.folder
        )
        self.folder.delete([file])
        return self.folder.create(file, claim)

    def is_alive(self, content: bytes) -> bool:
        """Return whether the process that wrote a claim may still be at work."""
        try:
            claim = json.loads(content)
            if time.time() - claim["time"] >= self.claim_seconds:
                return False
            # A container that is started again has the name and the process numbers that it had before.
            return claim["host"] != platform.node() or psutil.Process(claim["process"]).create_time() == claim["started"]
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:  # it is there, and another user's
            return True
        except (ValueError, KeyError, TypeError):
            return True  # being written; a claim that stays so is removed when the command is rerun
