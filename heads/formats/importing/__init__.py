"""Another program's draft, made into an artifact.

Start with `importer.import_draft`; `reading` recognises the format.
"""
