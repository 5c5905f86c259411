import sys
from pathlib import Path

# The example's scripts import each other as neighbours, as they do when they are run.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "quickstart"))
