"""The product's layout: imports run one way, files and functions stay short."""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.processes import REPOSITORY

PACKAGES = {
    **{name: REPOSITORY / name for name in ("explorer_service", "trainer_service", "services", "shared")},
    "flywheel": REPOSITORY / "agent_sdk" / "flywheel",
}
OTHERS = [REPOSITORY / name for name in ("examples", "benchmarks", "tests")]
FILES = [
    file
    for folder in (*PACKAGES.values(), *OTHERS)
    for file in sorted(folder.rglob("*.py"))
    if "node_modules" not in file.parts
]
MOST_LINES, MOST_IN_A_FUNCTION = 300, 45
TREES = ("shared", "explorer_service", "trainer_service")
WHOLE = 99  # parts of a module's name


def module_of(package: str, file: Path) -> str:
    parts = file.relative_to(PACKAGES[package].parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Facts(NamedTuple):
    """What these tests ask of a file."""

    lines: int
    functions: list[tuple[str, int]]  # names and numbers of lines
    classes: list[tuple[str, set[str]]]  # names and bases of those that are in no function or class
    imports: list[str]  # of a package's file


@functools.cache
def read(file: Path) -> Facts:
    text = file.read_text()
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    is_of_package = any(file.is_relative_to(folder) for folder in PACKAGES.values())
    return Facts(
        lines=text.count("\n"),
        functions=[(node.name, (node.end_lineno or 0) - node.lineno + 1) for node in functions],
        classes=[(node.name, {ast.unparse(base) for base in node.bases}) for node in classes],
        imports=list(imported(tree)) if is_of_package else [],
    )


def imported(tree: ast.AST) -> Iterator[str]:
    """What is imported when the code runs; what only a type checker imports is left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imported(node)


@pytest.mark.parametrize("depth", [2, WHOLE], ids=["rooms", "modules"])
@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_runs_upward(package, depth):
    """A room is a folder or a file right below its package. In a circle one import would run upward."""
    modules = {module_of(package, file): file for file in PACKAGES[package].rglob("*.py")}
    needs: dict[str, set[str]] = {}
    for module, file in modules.items():
        own = ".".join(module.split(".")[:depth])
        for name in read(file).imports:
            found = name if name in modules else name.rpartition(".")[0]
            other = ".".join(found.split(".")[:depth])
            if found in modules and other not in (own, package):
                needs.setdefault(own, set()).add(other)
    assert needs
    graphlib.TopologicalSorter(needs).prepare()  # raises CycleError, which names the circle


def test_no_file_and_no_function_is_long():
    """Migrations apart: each is a list of what was done once."""
    long = []
    for file in FILES:
        facts = read(file)
        if facts.lines > MOST_LINES:
            long.append(f"{file}: {facts.lines} lines")
        if "migrations" in file.parts:
            continue
        long += [f"{file}: {name} has {lines} lines" for name, lines in facts.functions if lines > MOST_IN_A_FUNCTION]
    assert not long


def test_every_exception_that_others_may_meet_is_drawn_in_a_tree():
    """In the errors.py of its package. What is private to a module need not be."""
    trees = {name: ast.get_docstring(ast.parse((PACKAGES[name] / "errors.py").read_text())) or "" for name in TREES}
    kinds = {"Exception", "ValueError", "OSError"}
    missing, classes = [], [(file, name, bases) for file in FILES for name, bases in read(file).classes]
    for _ in range(4):  # as deep as a tree is
        kinds |= {name for _, name, bases in classes if bases & kinds}
    for file, name, _ in classes:
        package = file.relative_to(REPOSITORY).parts[0]
        is_met = package in TREES and name in kinds and not name.startswith("_")
        if is_met and name not in trees[package]:
            missing.append(f"{file.relative_to(REPOSITORY)}: {name}")
    assert not missing
