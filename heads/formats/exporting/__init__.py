"""An artifact, written for the engine that serves it; `table` says which engine takes which kind of draft."""
