"""Text from elsewhere, such as names in an artifact, in a form that cannot command a terminal or reorder what is read.

Control characters start the escape sequences by which a terminal is cleared, renamed or made to answer; bidirectional controls
show a text in another order than it has. Both are written out, as `\\x1b`.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

from configs.runtime.redaction import redact

# All controls but tab and line feed, line and paragraph separators, directional marks, invisible tags, lone surrogates, and
# characters of no width but the two that join or part letters of some scripts.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """Return a text with control characters written out; tabs and line ends stay."""
    return UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Return a text on one line, printable."""
    return printable(" ".join(text.split()))


def say(text: str, file: TextIO | None = None) -> None:
    """Print a text, printable and without secrets; to standard output unless `file` is given."""
    print(redact(printable(text)), file=sys.stdout if file is None else file)


def show(text: str) -> None:
    """Print a text as it is to standard output; a reader that has seen enough and closed it, such as `head`, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # Python writes at its end what is buffered still: nowhere, or it would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
