"""The site: its pages are those of the code, short, and reachable; its pictures are those of their
texts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs.pictures import badges, curves, draw, screen
from docs.site import reference

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*/*.md"))
GENERATED = {"events", "run-file", "commands", "api"}
WORDS_MAX = 1500
"""Of a page that is written by hand."""
README_MAX_BYTES = 5000
LINE_MAX = 140
SENTENCE_MAX_WORDS = 35


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_reference_is_that_of_the_code(name: str) -> None:
    written = (DOCS / "reference" / f"{name}.md").read_text(encoding="utf-8")
    assert written == reference.PAGES[name](), "run: python -m docs.site.reference"


@pytest.mark.parametrize(
    "path", sorted((DOCS / "pictures").glob("*.diagram")), ids=lambda p: p.stem
)
def test_a_picture_is_that_of_its_text(path: Path) -> None:
    written = path.with_suffix(".svg").read_text(encoding="utf-8")
    assert written == draw.drawn(path.read_text(encoding="utf-8")), (
        "run: python -m docs.pictures.draw"
    )


def test_the_animated_screen_is_that_of_the_run_that_was_kept() -> None:
    kept = (DOCS / "pictures/screen.txt").read_text(encoding="utf-8")
    assert (DOCS / "pictures/screen.svg").read_text("utf-8") == screen.animated(
        kept.split(screen.PAGE)
    )
    assert "kill -9 learner-3" in kept


def test_badges_say_what_the_project_says_of_itself() -> None:
    written = badges.KEPT.read_text(encoding="utf-8")
    assert written == badges.drawn(badges.described()), "run: python -m docs.pictures.badges"
    (words,) = re.findall(r"!\[([^\]]*)\]\(docs/pictures/badges", (ROOT / "README.md").read_text())
    for _, text in badges.facts(badges.described()):
        assert text.partition(",")[0] in words


@pytest.mark.parametrize("axis", curves.AXES)
def test_curves_are_those_of_the_kept_points(axis: str) -> None:
    kept = json.loads(curves.KEPT.read_text(encoding="utf-8"))
    written = (DOCS / f"pictures/loss-by-{axis}.svg").read_text(encoding="utf-8")
    assert written == curves.drawn(kept, axis), "run: python -m docs.pictures.curves"


@pytest.mark.parametrize("picture", sorted((DOCS / "pictures").glob("*.svg")), ids=lambda p: p.stem)
def test_a_picture_asks_no_other_host_and_says_in_words_what_it_shows(picture: Path) -> None:
    text = picture.read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\"'\s<]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert re.search(r"<title>[^<]{20,}</title>", text)


def test_every_picture_is_shown_on_a_page_with_words_beside_it() -> None:
    shown: dict[str, str] = {}
    for page in (*PAGES, ROOT / "README.md"):
        for words, name in re.findall(
            r"!\[([^\]]*)\]\(\S*?(\w[\w-]*)\.svg\)", page.read_text("utf-8")
        ):
            shown[name] = words
    assert shown.keys() == {path.stem for path in (DOCS / "pictures").glob("*.svg")}
    assert all(len(words) > 20 for words in shown.values())


def test_the_index_and_the_site_list_every_page() -> None:
    names = {path.relative_to(DOCS).as_posix() for path in PAGES}
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([\w-]+/[\w-]+\.md)\)", index)) == names
    site = (DOCS / "site/mkdocs.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"- ([\w-]+/[\w-]+\.md)$", site, re.MULTILINE)) == names


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= README_MAX_BYTES


WRITTEN = [
    *(ROOT / name for name in ("README.md", "BOOTSTRAP.md", "SECURITY.md", "CONTRIBUTING.md")),
    *(page for page in PAGES if page.stem not in GENERATED),
]


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_a_page_is_read_in_minutes(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").split()) <= WORDS_MAX


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_lines_are_short(page: Path) -> None:
    """Rows of tables and commands, which Markdown does not break, may be longer."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    text = re.sub(r"`[^`\n]{60,}`", "", text)
    long = [line for line in text.splitlines() if len(line) > LINE_MAX and line[0] != "|"]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_sentences_are_short(page: Path) -> None:
    long = [
        text
        for text in sentences(page.read_text("utf-8"))
        if len(text.split()) > SENTENCE_MAX_WORDS
    ]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=named)
def test_no_table_has_a_bar_in_code(page: Path) -> None:
    """GitHub shows it without its backslash, and the site with it."""
    assert not re.search(r"`[^`\n]*\\\|[^`\n]*`", page.read_text("utf-8"))


def sentences(text: str) -> list[str]:
    """What stands between two full stops, colons or semicolons, outside of code and tables."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    text = re.sub(r"`[^`]*`", "code", text)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "#", "!"))]
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines))
    return [
        sentence
        for block in blocks
        for sentence in re.split(r"(?<=[.!?:;])[\"')*]*\s+", " ".join(block.split()))
    ]


PICTURED = {
    "README.md": 1,
    "docs/develop/map.md": 1,
    "docs/lend/watching.md": 1,
    "docs/research/claims.md": 1,
    "docs/research/results-slow-links.md": 3,
    "docs/understand/pictures.md": 7,
}
"""Pages that promise pictures, and at least how many."""


@pytest.mark.parametrize("name", PICTURED)
def test_a_page_that_promises_a_picture_has_one(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    shown = re.findall(r"!\[[^\]]+\]\((\S+)\)", text)
    assert len(shown) >= PICTURED[name]
    assert all(((ROOT / name).parent / path).exists() for path in shown)


GLOSSARY = DOCS / "understand/glossary.md"
OUTSIDE = re.compile(
    r"^```.*?^```|^#[^\n]*|^\s*<a id[^\n]*|`[^`]*`|!?\[[^\]]*\]\([^)]*\)", re.MULTILINE | re.DOTALL
)
"""Code, headings, anchors and links: what no word is looked for in."""


def coined() -> list[str]:
    """The words of the glossary that are ours."""
    rows = re.findall(r"^\| [^|]*", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    return re.findall(r"\*\*([a-z ]+)\*\*", "".join(rows))


def unexplained(text: str, words: list[str]) -> set[str]:
    """Words that are used before a link to the glossary has them."""
    prose = OUTSIDE.sub(lambda part: " " * len(part[0]), text)
    missing = set()
    for word in words:
        form = word.replace(" ", r"\s+") + "s?"
        used = re.search(rf"\b{form}\b", prose, re.IGNORECASE)
        linked = re.search(rf"\[{form}\]\(\S*glossary\.md\)", text, re.IGNORECASE)
        if used and (linked is None or used.start() < linked.start()):
            missing.add(word)
    return missing


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent.name != "reference" and page != GLOSSARY],
    ids=named,
)
def test_the_first_use_of_a_word_of_ours_is_a_link_to_the_glossary(page: Path) -> None:
    assert not unexplained(page.read_text(encoding="utf-8"), coined())


def test_a_word_of_ours_without_a_link_is_found() -> None:
    words = ["safe point", "meld"]
    assert "meld" in coined() and "safe point" in coined()
    assert unexplained("A meld at a safe\npoint.", words) == {"safe point", "meld"}
    assert (
        unexplained("## Meld\n\n`meld` [Melds](../understand/glossary.md), a meld", words) == set()
    )
    assert unexplained("a meld, a [meld](glossary.md)", words) == {"meld"}


def test_long_sentences_are_found() -> None:
    long = "word " * 36
    assert [len(text.split()) for text in sentences(f"- {long}\n- one. two: {long}")] == [
        37,
        2,
        1,
        36,
    ]
