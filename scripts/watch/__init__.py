"""`draftsmith watch`: a run's folder read, in sentences, in a terminal and as a page."""
