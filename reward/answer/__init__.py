"""Mathematical answers: finding the statement in a response, cleaning it, reading it, comparing it."""
