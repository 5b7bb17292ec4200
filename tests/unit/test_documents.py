"""What the documents name exists: links, headings, settings with their defaults, tests, files of the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.config import ALGORITHMS, Config
from shared.config.base import Section
from shared.experience import Purpose, VersionState

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "agent_sdk/README.md", *sorted(DOCS.rglob("*.md"))]
SECTIONS = ("explorer", "engine", "trainer", "reward", "versions", "model")
TOPS = (
    "services",
    "explorer_service",
    "trainer_service",
    "shared",
    "agent_sdk",
    "examples",
    "tests",
    "benchmarks",
    "docs",
)
NO_SETTINGS = {  # files, a column, a key of Trinity's
    "engine.token", "model.safetensors", "model.delta.safetensors", "reward.py", "versions.parent",
    "trainer.trainer_config",
}  # fmt: skip
PARTS = {page: page.read_text(encoding="utf-8") for page in PAGES}


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    lines = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", line.strip().lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_leads_to_a_file_and_to_a_heading_in_it(page):
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", PARTS[page]) if not target.startswith("http")]
    for target in targets:
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        assert not heading or heading in headings(file), target


def settings(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each key of the configuration, with its default."""
    for name, field in section.model_fields.items():
        yield prefix + name, field.default
        kinds = [field.annotation]
        for kind in kinds:
            kinds += getattr(kind, "__args__", ())
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from settings(kind, f"{prefix}{name}.")


SETTINGS = dict(settings(Config))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "trinity.md"], ids=lambda page: page.stem)
def test_a_setting_that_a_page_names_exists(page):
    named = re.findall(rf"`((?:{'|'.join(SECTIONS)})(?:\.\w+)+)(?:: [^`]*)?`", PARTS[page])
    assert {name for name in named if not name.startswith("trainer.deepspeed.")} - NO_SETTINGS <= SETTINGS.keys()


def test_a_default_in_parentheses_is_the_setting_s():
    texts = [PARTS[page] for page in PAGES]
    found = [one for text in texts for one in re.findall(r"`(\w+(?:\.\w+)+)` \((\d[\d,.]*)[):]", text)]
    shown = [(name, float(value.replace(",", ""))) for name, value in found if name in SETTINGS]
    assert shown
    for name, value in shown:
        assert SETTINGS[name] == value, name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_defaults_on_an_algorithm_s_page_are_those_of_its_section(algorithm):
    """A cell has a default for each key, or words; words are not compared."""
    text, section = PARTS[DOCS / f"algorithms/{algorithm}.md"], ALGORITHMS[algorithm]()
    table = text.partition(f"| key in `trainer.{algorithm}` |")[2].partition("\n\n")[0]
    for keys, values in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([^|]*) \|", table, re.M):
        names, shown = re.findall(r"`(\w+)`", keys), [yaml.safe_load(value) for value in values.split(", ")]
        for name, value in zip(names, shown, strict=False):
            assert hasattr(section, name)
            default = getattr(section, name)
            assert value == default or (isinstance(value, str) and not isinstance(default, bool)), name


def test_the_page_of_the_ledger_s_versions_names_every_state_and_every_purpose():
    text = PARTS[DOCS / "versions.md"]
    assert set(VersionState) <= set(re.findall(r"^\| `?([\w-]+)`? \|", text, re.M))
    purposes = text.partition("| purpose | reader |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", purposes, re.M)) == set(Purpose)


def plain(name: str) -> str:
    """A test's name as words, without punctuation."""
    return re.sub(r"[^a-z0-9]+", " ", name.lower().replace("'", "").removeprefix("test_").replace("_", " ")).strip()


def references(cell: str) -> Iterator[tuple[str, str]]:
    """Each file in a cell of the page, with what it names there: a test or the beginning of its name; "" for none."""
    file = ""
    for reference, words in re.findall(r"`([^`]+)`(?:: ([^`]*))?", cell):
        path, _, name = reference.partition("::")
        file = file if path == "…" else path
        for one in [name] if name else re.split("[;,] ", words.strip(" ;,")):
            yield file, one


def test_every_test_on_the_page_about_security_exists():
    rows = re.findall(r"^\|.* \| ([^|]*test_[^|]*) \|$", PARTS[DOCS / "security.md"], re.M)
    found = [reference for row in rows for reference in references(row)]
    assert len(rows) > 80
    for file, name in found:
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        if name.startswith("the section on "):
            assert re.search(rf"^# -+ {name.removeprefix('the section on ')}$", text, re.M), (file, name)
        else:
            names = [plain(one) for one in re.findall(r"^(?:async )?def (test_\w+)", text, re.M)]
            assert any(one.startswith(plain(name)) for one in names), (file, name)


def test_the_readme_s_tables_of_the_code_name_what_is_there():
    text = PARTS[ROOT / "README.md"].partition("## How the code is laid out")[2]
    files = [
        file.relative_to(ROOT) for top in TOPS for file in (ROOT / top).rglob("*.*") if file.suffix in (".py", ".md")
    ]
    for folder, cell in re.findall(r"^\| `(\w+)/` \| (.*) \|$", text, re.M):
        there = {name for file in files if file.parts[0] == folder for name in (*file.parts[1:-1], file.stem)}
        named = re.findall(r"`(\w+/?)`", re.sub(r"\(for [^)]*\)|`import flywheel`", "", cell))
        assert {name.rstrip("/") for name in named} <= there, folder
    paths = {
        name for cell in re.findall(r"^\| [^`|]+ \| (`.*) \|$", text, re.M) for name in re.findall(r"`([^`]+)`", cell)
    }
    assert len(paths) > 20
    assert not [path for path in paths if not any(f"/{file}".endswith(f"/{path}") for file in files)]
