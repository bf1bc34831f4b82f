"""`draftsmith check`: an export tried in the engine that it is for."""
