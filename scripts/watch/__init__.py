"""`draftsmith watch`: a run's folder read, in sentences and in a terminal."""
