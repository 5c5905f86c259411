"""Every relative link of every document leads to a file of the repository, and to a heading where it names one."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs.documents import ROOT, anchors, documents, prose

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")


def broken_links(file: Path) -> list[str]:
    """Targets that lead nowhere, with the reason."""
    found = []
    for target in LINK.findall(prose(file.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        there = (file.parent / path).resolve() if path else file
        if not there.exists():
            found.append(f"{target}: no such file")
        elif not there.is_relative_to(ROOT) and ROOT in file.parents:
            found.append(f"{target}: outside the repository")
        elif anchor and anchor not in anchors(there.read_text()):
            found.append(f"{target}: no such heading; there are {sorted(anchors(there.read_text()))}")
    return found


@pytest.mark.parametrize("file", documents(), ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_somewhere(file: Path) -> None:
    assert not broken_links(file)


def test_a_broken_link_or_anchor_is_found(tmp_path) -> None:
    (tmp_path / "other.md").write_text("# One `two`: three!\n\n# One two three\n```\n# no heading\n```\n")
    file = tmp_path / "page.md"
    file.write_text(
        "[a](other.md) [b](other.md#one-two-three) [c](other.md#one-two-three-1) [d](https://x.invalid/y)\n"
        "[e](gone.md) [f](other.md#no-heading) ![g](gone.png)\n```\n[h](gone.md)\n```\n"
    )
    assert [item.split(":")[0] for item in broken_links(file)] == ["gone.md", "other.md#no-heading", "gone.png"]


def test_the_index_names_every_page_and_every_example() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    named = {(ROOT / "docs" / target.partition("#")[0]).resolve() for target in LINK.findall(index)}
    pages = {file for file in documents() if file.is_relative_to(ROOT / "docs")} - {ROOT / "docs" / "README.md"}
    pages |= {file for file in documents() if file.is_relative_to(ROOT / "examples")}
    assert not {str(page.relative_to(ROOT)) for page in pages - named}
