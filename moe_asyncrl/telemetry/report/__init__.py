"""`report.html`: one page about a run, from its folder alone."""
