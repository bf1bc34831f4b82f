"""Looking in on a run: its folder read (`state`), in sentences (`text`), as a page (`page`) and in a terminal (`terminal`)."""
