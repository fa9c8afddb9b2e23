"""Lists of pages: each with its title and its first sentence, or what the page says it is about.

    <!-- pages: rehearse preflight -->     these pages of the folder, in this order
    <!-- pages: * -->                      all others of the folder under "More", by name, if any

A page whose first sentence does not say enough has a comment `<!-- about: ... -->` below its title.
"""

from __future__ import annotations

import re
from pathlib import Path

PAGES = re.compile(r"^<!-- pages: (?P<names>[^\n]+) -->\n(?:\n## More\n\n)?(?:- .*\n)*", re.M)
ABOUT = re.compile(r"^<!-- about: (?P<text>.+?) -->$", re.M | re.S)
LINK = re.compile(r"\[(?P<text>[^\]]+)\]\([^)]+\)")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
INDEX = "README"


def page_lists(text: str, folder: Path) -> str:
    """`text`, an index in `folder`, with its lists as the pages are now."""
    named = [name for match in PAGES.finditer(text) for name in match["names"].split()]

    def listed(match: re.Match[str]) -> str:
        names = match["names"].split()
        head = ""
        if names == ["*"]:
            names = sorted({path.stem for path in folder.glob("*.md")} - {*named, INDEX})
            head = "\n## More\n\n" if names else ""
        lines = "".join(f"- {page_line(folder / f'{name}.md')}\n" for name in names)
        return f"<!-- pages: {match['names']} -->\n{head}{lines}"

    return PAGES.sub(listed, text)


def page_line(path: Path) -> str:
    """`[Title](page.md): what it is about`."""
    text = path.read_text(encoding="utf-8")
    return f"[{text.partition(chr(10))[0].removeprefix('# ')}]({path.name}): {about(text)}"


def about(page: str) -> str:
    """One sentence on what a page says, without links, whose way is another page's."""
    match = ABOUT.search(page)
    if match is not None:
        return " ".join(match["text"].split())
    paragraphs = FENCE.sub("", page).split("\n\n")
    prose = (" ".join(each.split()) for each in paragraphs[1:] if each.strip()[:1] not in "<|#")
    first = re.split(r"(?<=[.?!:])\s", next(prose, ""))[0]
    plain = LINK.sub(r"\g<text>", first).rstrip(".:")
    return plain if plain.endswith("?") else f"{plain}."
