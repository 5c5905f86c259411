"""Programs beside the package: run from the repository root as `python -m tools.NAME`."""
