"""What every command shares: files, locks, progress, the record of a run, and errors turned into exit codes.

A command enters at `command.run_command`, which loads its config (`loading.load_config`) and reports a mistake of the user's in
one sentence.
"""
