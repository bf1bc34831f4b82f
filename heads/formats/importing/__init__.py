"""Another program's draft, made into an artifact.

`reading` recognises the format, `importer` fits the tensors to the target and writes the artifact.
"""

from heads.formats.importing.importer import fit, write_artifact
from heads.formats.importing.reading import read_external

__all__ = ["fit", "read_external", "write_artifact"]
