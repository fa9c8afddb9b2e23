"""The documentation as a site: every page is in an index, and none is left out of the sidebar.

The whole site is built where Sphinx is installed (`make site` does so) and `--whole` asks for it.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FOLDERS = sorted(path for path in DOCS.iterdir() if path.is_dir() and any(path.glob("*.md")))


@cache
def settings() -> Any:
    """`docs/conf.py`, which Sphinx reads."""
    spec = importlib.util.spec_from_file_location("conf", DOCS / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_page_is_in_the_index_of_its_folder(folder: Path) -> None:
    index = folder / "README.md"
    assert index.exists(), f"docs/{folder.name} has no README.md, the index of its pages"
    linked = set(re.findall(r"\]\(([\w.-]+\.md)", index.read_text(encoding="utf-8")))
    for page in sorted(path.name for path in folder.glob("*.md") if path != index):
        assert page in linked, (
            f"docs/{folder.name}/{page} is in no list of docs/{folder.name}/README.md: type "
            "`make docs`, or name it under a heading there, <!-- pages: ... -->"
        )


def test_the_sidebar_has_every_page_once() -> None:
    indexes = [DOCS / "README.md", *(folder / "README.md" for folder in FOLDERS)]
    pages = [
        (index.parent / f"{name}.md").resolve()
        for index in indexes
        for name in settings().contents(index)
    ]
    assert len(pages) == len(set(pages))
    beside = {ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")}
    assert {*pages, DOCS / "README.md"} == {*DOCS.rglob("*.md"), *beside}


def test_a_page_says_what_it_is_about() -> None:
    from docs.page_index import about

    assert about("# T\n\n```bash\nls\n```\n\nSee [x](y.md): so.\n") == "See x."
    assert about("# T\n\n<!-- about: All\nof it. -->\n\nMore.\n") == "All of it."
    assert about("# T\n\nHow far off?\n") == "How far off?"
    for page in {*DOCS.glob("*/*.md")} - {*DOCS.glob("*/README.md")}:
        text = about(page.read_text(encoding="utf-8"))
        assert 10 < len(text) < 200, f"{page}: put <!-- about: ... --> below its title: {text!r}"


def test_the_page_of_python_says_what_every_name_is_and_raises() -> None:
    import fsdpplan
    from docs.python_api import api_page

    page = api_page()
    for name in fsdpplan.__all__:
        one = getattr(fsdpplan, name)
        assert f"### `{name}`\n" in page
        says = "Raises" in (one.__doc__ or "") or name in ("compare", "rules", "sensitivities")
        assert isinstance(one, type) or says, f"{name}: say what it raises"
    unsaid = re.findall(r"^\| `(\w+)` \| .* \|  \|$", page, re.M)
    assert not unsaid, f"put a docstring under {', '.join(unsaid)}"


CHAPTER = re.compile(r"^\| \[[^\]]+\]\((?P<page>[\w-]+\.md)\) \|.*\| (?P<code>`.+`)? ?\|$", re.M)
BEATS = ("Notation", "The claim", "How it follows", "A number by hand", "Where this is wrong")


def chapters() -> dict[str, list[str]]:
    """Chapters of the cost model -> folders and modules of `fsdpplan/cost/` that they are about."""
    page = (DOCS / "explanation" / "cost-model.md").read_text(encoding="utf-8")
    return {m["page"]: re.findall(r"`([\w.]+)`", m["code"] or "") for m in CHAPTER.finditer(page)}


def test_every_folder_of_the_cost_model_has_a_chapter() -> None:
    cost = ROOT / "fsdpplan" / "cost"
    told = {code for codes in chapters().values() for code in codes}
    folders = {path.name for path in cost.iterdir() if (path / "__init__.py").exists()}
    assert folders <= told, f"no chapter of docs/explanation/cost-model.md is of {folders - told}"
    assert all((cost / code).exists() for code in told)


def test_a_chapter_has_its_five_beats_and_says_where_it_is_wrong() -> None:
    about_code = [page for page, codes in chapters().items() if codes]
    assert len(about_code) >= 9
    for page in about_code:
        text = (DOCS / "explanation" / page).read_text(encoding="utf-8")
        headings = re.findall(r"^## (.+)$", text, re.M)
        assert [beat for beat in BEATS if beat in headings] == list(BEATS), page
        places = [headings.index(beat) for beat in BEATS]
        assert places == sorted(places), f"{page}: its beats are out of order"
        assert re.search(r"^> \*\*", text, re.M), f"{page} has no box to remember"
        wrong = text.partition("## Where this is wrong")[2]
        assert wrong.count("\n- ") >= 3, f"{page} says too little of where it is wrong"


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not request.config.getoption("--whole"):
        pytest.skip("a site takes ten seconds: --whole builds it, as `make site` does")
    pytest.importorskip("sphinx", reason="the extra `docs` is not installed")
    place = tmp_path_factory.mktemp("site")
    words = ["--fail-on-warning", "--keep-going", "--quiet", "--conf-dir", str(DOCS)]
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *words, "-d", str(place / "cache"), ".", str(place)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return place


def test_the_site_is_built_without_a_warning_and_fetches_nothing(site: Path) -> None:
    pages = [path.read_text(encoding="utf-8") for path in site.rglob("*.html")]
    assert len(pages) > 100
    for page in pages:
        loaded = re.findall(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"([^\"]+)\"", page)
        assert not [url for url in loaded if re.match(r"(https?:)?//", url)]
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text(encoding="utf-8"))
    assert "docs/README.html" in (site / "index.html").read_text(encoding="utf-8")


def test_the_search_finds_pages_by_their_words(site: Path) -> None:
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    assert "docs/guides/network" in index["docnames"]
    found = {index["docnames"][number] for number in index["terms"]["oversubscript"]}
    assert "docs/reference/clusters" in found
