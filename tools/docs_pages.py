"""What the documentation has from the code: docs/config.md, docs/metrics.md and, of finished runs, its screenshots.

python -m tools.docs_pages
python -m tools.docs_pages --pictures runs/quickstart runs/quickstart-seed1   # needs Chromium
"""

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from megatron_dapo.config.load import shown
from megatron_dapo.config.root import Config
from megatron_dapo.plan.scenario import load_calibration
from megatron_dapo.report.page import page_environment, report_page
from megatron_dapo.report.source import Run
from tools.metric_catalog import GROUPS
from tools.throughput import page, profile_run

ROOT = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PLANNED = "examples/qwen2.5_32b/h100_32.yaml"

HEADER = """# Configuration reference

Made from the code by `make docs`. A config is a YAML file with these sections; on the command line a key is
`section.key=value`. In brackets: type and default. Defaults are the paper's where it states one. At the top,
`preset: NAME` sets a recipe's keys ([algorithm.md](algorithm.md#the-family)) that the file leaves out.
"""


def config_page() -> str:
    """Markdown: a list a section. A key that an earlier section has too, with the same meaning, is named only."""
    parts, seen = [HEADER], dict[tuple[str, str], str]()
    for field in dataclasses.fields(Config):
        parts.append(_section(field.name, field.type, seen))
    return "\n".join(parts)


def _section(name: str, section: Any, seen: dict[tuple[str, str], str]) -> str:
    """`seen`: (key, entry) -> the section that has it."""
    lines = [f"### {name}", ""] if "." in name else [f"## {name}", "", section.__doc__, ""]
    below, same = [], dict[str, list[str]]()
    for key, field in section.__pydantic_fields__.items():
        kind = field.annotation
        if dataclasses.is_dataclass(kind):
            below.append((f"{name}.{key}", kind))
            continue
        items = get_args(kind)[:1] if get_origin(kind) is tuple else ()
        below += [(f"{name}.{key}.N", item) for item in items if dataclasses.is_dataclass(item)]
        default = "required" if field.is_required() else f"`{shown(field.get_default(call_default_factory=True))}`"
        entry = f"({_type(kind)}, {default}): {_description(section, key)}"
        if seen.setdefault((key, entry), name) == name:
            lines.append(f"- `{name}.{key}` {entry}")
        else:
            same.setdefault(seen[key, entry], []).append(f"`{key}`")
    lines += [f"- As in `{other}`: {', '.join(keys)}." for other, keys in same.items()]
    if lines[-1]:
        lines.append("")
    return "\n".join(lines) + "".join("\n" + _section(*child, seen) for child in below)


def _description(section: Any, key: str) -> str:
    """The text under the field, in the class that has it."""
    owner = next(each for each in section.__mro__ if key in getattr(each, "__annotations__", ()))
    return " ".join(owner.__pydantic_fields__[key].description.split())


def _type(annotation: Any) -> str:
    """`int`, `a`/`b`, `list of float`, ... without the bounds, which the error messages state."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return "/".join(f"`{option}`" for option in arguments)
    if origin in (Union, UnionType):
        return "/".join(_type(option) for option in arguments)
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return f"{_type(arguments[0])} to {_type(arguments[1])}"
    if dataclasses.is_dataclass(annotation):
        return "section"
    return "none" if annotation is type(None) else annotation.__name__


def metrics_page() -> str:
    """Markdown: every metric of the catalog."""
    return page_environment(ROOT / "tools" / "templates").get_template("metrics.md.j2").render(groups=GROUPS)


def pictures(runs: Sequence[Path], folder: Path) -> None:
    """Screenshots of their report, of the last one's throughput and of a plan, as PNG files in `folder`.

    Raises:
        FileNotFoundError: no Chromium on this machine.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise FileNotFoundError(f"no browser: install one of {', '.join(BROWSERS)}")
    found = [Run(path) for path in runs]
    last = profile_run(found[-1], skip=1, peak_flops=load_calibration().peak_flops, tail_share=0.5)
    command = [sys.executable, "-m", "megatron_dapo.cli.main", "plan", PLANNED]
    plan = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"COLUMNS": "120"}, capture_output=True, text=True, check=True
    )
    environment = page_environment(ROOT / "tools" / "templates")
    terminal = environment.get_template("terminal.html.j2").render(
        command=f"megatron-dapo plan {PLANNED}", text=plan.stdout
    )
    pages = {"report": (report_page(found), 720), "throughput": (page([last]), 860), "plan": (terminal, 960)}
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        for name, (html, height) in pages.items():
            file = Path(scratch, f"{name}.html")
            file.write_text(html, encoding="utf-8")
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={scratch}"]
            options += ["--blink-settings=preferredColorScheme=1", f"--window-size=1184,{height}"]
            shot = [browser, *options, f"--screenshot={folder / name}.png", file.as_uri()]
            subprocess.run(shot, capture_output=True, timeout=120, check=True)


def main() -> None:
    """Write both pages, and the screenshots of the runs that are given."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs_pages", description=__doc__.split("\n")[0])
    parser.add_argument("--pictures", type=Path, nargs="+", metavar="RUN", default=[], help="finished runs to picture")
    given = parser.parse_args()
    (ROOT / "docs" / "config.md").write_text(config_page(), encoding="utf-8")
    (ROOT / "docs" / "metrics.md").write_text(metrics_page(), encoding="utf-8")
    if given.pictures:
        pictures(given.pictures, ROOT / "docs" / "images")


if __name__ == "__main__":
    main()
