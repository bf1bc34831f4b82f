"""Another program's draft, made into an artifact.

`reading` recognises the format, `importer` fits the tensors to the target and writes the artifact.
"""
