"""Settings of Sphinx, which makes a site of the pages: `make site`.

The pages are plain Markdown, whose links lead from file to file, so that they read as well where a
forge shows them. What a site needs besides is made here: each `README.md` under `docs/` is the
index of its folder, and its table of contents follows from the links that it has.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fsdpplan import __version__  # noqa: E402

project = "fsdpplan"
author = "The fsdpplan authors"
release = version = __version__

extensions = ["myst_parser", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
root_doc = "docs/README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**.md"]
# Sphinx walks all folders before it looks at the patterns.
exclude_patterns = [".*", "build", "demo", "dist", "fsdpplan*", "hardware_profiles", "tests"]
nitpicky = True
suppress_warnings = ["myst.header"]  # the page of commands has no heading of its own levels

myst_heading_anchors = 4
pygments_style, pygments_dark_style = "tango", "github-dark"
# What a program printed is not to be typed.
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"

html_theme = "furo"
html_title = f"fsdpplan {__version__}"
html_copy_source = html_show_sourcelink = html_show_copyright = False
html_extra_path = ["site/index.html"]
html_static_path = ["site/static"]
html_js_files = [("search.js", {"priority": 600})]  # after the options that it changes

LINK = re.compile(r"(?<!!)\[[^\]]+\]\((?P<page>[^)#\s]+\.md)(?:#[^)]*)?\)")
MORE = ["../README", "../CONTRIBUTING", "../CHANGELOG"]


def contents(index: Path) -> list[str]:
    """The pages below an index: those that it links to, in its order, then all others of its
    folder. The index of all has those of folders, and the pages beside the documentation."""
    here = index.parent
    text = index.read_text(encoding="utf-8")
    linked = [match["page"].removesuffix(".md") for match in LINK.finditer(text)]
    inside = [page for page in linked if "/" not in page]
    beside = sorted(path.stem for path in here.glob("*.md"))
    if here == ROOT / "docs":
        inside = [page for page in linked if page.count("/") < 2 and not page.startswith("..")]
        inside = [page for page in inside if page.endswith("/README") or page in beside]
        beside += MORE
    return [page for page in dict.fromkeys([*inside, *beside]) if page != "README"]


def add_contents(_app: Any, name: str, source: list[str]) -> None:
    """An index of the site has its pages in the sidebar."""
    index = ROOT / f"{name}.md"
    if index.name == "README.md" and index.parent != ROOT:
        pages = "\n".join(contents(index))
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", add_contents)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
