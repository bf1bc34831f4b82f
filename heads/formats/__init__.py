"""Other programs' checkpoints: `importing` makes artifacts of them, `exporting` makes them of artifacts.

`layout` and `names` hold what both directions need.
"""

from heads.formats.exporting.exporter import export
from heads.formats.importing.importer import fit, write_artifact
from heads.formats.importing.reading import read_external

__all__ = ["export", "fit", "read_external", "write_artifact"]
