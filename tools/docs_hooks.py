"""Hooks of mkdocs: pages may link to files of the repository as they do on a code host.

Files in the repository's root that are pages too, and whatever else a page links to outside docs/
(pictures, examples), become files of the site; the links are rewritten to them.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")

LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def place_of(path: Path) -> str | None:
    """Where a file of the repository is in the site; None for what is no file of it."""
    for folder in (DOCS, ROOT):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix() if path.is_file() else None
    return None


def links_of(page: Path) -> Iterator[Path]:
    """Files that a page links to."""
    for match in LINK.finditer(page.read_text()):
        yield (page.parent / match[1]).resolve()


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root, then what pages link to."""
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for page in [file for file in files if file.is_documentation_page()]:
        for path in links_of(Path(page.abs_src_path)):
            place = place_of(path)
            if place is not None and files.get_file_from_path(place) is None:
                files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at where their files are in the site."""
    folder = Path(page.file.abs_src_path).parent

    def rewritten(match: re.Match[str]) -> str:
        place = place_of((folder / match[1]).resolve())
        if place is None:
            return match[1]
        return posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".")

    return LINK.sub(rewritten, markdown)
