"""An artifact, written for the engine that serves it.

Start with `exporter.export`; `table` says which engine takes which kind of draft, and in what form.
"""

from heads.formats.exporting.exporter import export
from heads.formats.exporting.source import read_source

__all__ = ["export", "read_source"]
