"""Exported drafts in real serving engines. Start with `cases.run_checks`."""
