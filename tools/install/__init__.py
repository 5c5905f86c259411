"""`make install`: a virtual environment with the tried versions of everything, from a Python and a package index."""
