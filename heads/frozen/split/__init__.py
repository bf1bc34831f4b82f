"""A target split over processes: groups that share one (`groups`), and what each of them holds (`parts`)."""
