"""Mathematical answers: finding the statement in a response, cleaning it, reading it, comparing it. No sympy but in `symbolic`."""
