"""`draftsmith import`: another program's draft, tried before its artifact is written."""
