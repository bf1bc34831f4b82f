"""Another program's draft, made into an artifact: `reading` recognises the format, `importer` fits and writes."""
