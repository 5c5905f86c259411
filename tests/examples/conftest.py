import sys
from pathlib import Path

# The examples' scripts import each other as neighbours, as they do when they are run.
for name in ("quickstart", "verifiers"):
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / name))
