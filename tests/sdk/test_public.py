"""The distribution: what it needs, what it imports, and that each example in it runs."""

from __future__ import annotations

import ast
import contextvars
import doctest
import importlib
import inspect
import pickle
import subprocess
import sys

import flywheel
import pytest

from tests.support.processes import REPOSITORY

SDK = REPOSITORY / "agent_sdk"
FILES = sorted((SDK / "flywheel").glob("*.py"))
FRAMEWORKS = {"agentscope", "langchain_openai", "agents", "pydantic_ai", "smolagents"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_examples_in_docstrings_run(file):
    if file.stem == "__main__":
        pytest.skip("the command has no examples")
    name = "flywheel" if file.stem == "__init__" else f"flywheel.{file.stem}"
    importlib.import_module(name)
    run = contextvars.copy_context().run  # what an example marks stays in it
    failed, _ = run(doctest.testmod, sys.modules[name], optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert failed == 0


def test_every_public_name_has_a_docstring_with_an_example():
    of_rewards = {name: found for name, found in vars(flywheel.rewards).items() if name[0] != "_" and callable(found)}
    own = {name: found for name, found in of_rewards.items() if found.__module__.startswith("flywheel")}
    assert {"exact", "number", "boxed", "gsm8k", "contains", "ToolUse", "Weighted", "from_openai_grader"} <= set(own)
    for name, found in {**{name: getattr(flywheel, name) for name in flywheel.__all__}, **own}.items():
        if inspect.ismodule(found):
            assert found.__doc__
            continue
        assert ">>>" in (inspect.getdoc(found) or ""), f"{name} has no example"
        for part, value in vars(found).items() if inspect.isclass(found) else ():
            if part[0] != "_" and (inspect.isfunction(value) or isinstance(value, (property, classmethod))):
                assert inspect.getdoc(value), f"{name}.{part} has no docstring"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_only_httpx_openai_and_the_standard_library_are_imported(file):
    tree = ast.parse(file.read_text(), feature_version=(3, 10))
    allowed = {*sys.stdlib_module_names, "httpx", "openai", "typing_extensions", "flywheel"}
    if file.name == "frameworks.py":
        allowed |= FRAMEWORKS
        assert not FRAMEWORKS & {name for node in tree.body for name in imported(node)}
    for node in ast.walk(tree):
        assert imported(node) <= allowed, f"{file.name} imports {imported(node) - allowed}"
    for node in tree.body:
        assert "openai" not in imported(node), "OpenAI's client is imported where it is made"


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    return {(node.module or "").split(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def loaded_after(code: str) -> list[str]:
    """Those of some modules that a fresh process has imported after it ran the code."""
    some = {"openai", "openai.resources.chat.completions", "shared", "services", "numpy", "pydantic"}
    code = f"import sys, flywheel\n{code}\nprint(*sorted({some} & set(sys.modules)))"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=SDK, env={"PYTHONPATH": str(SDK)}, capture_output=True, text=True, check=True
    )
    return ended.stdout.split()


def test_importing_it_imports_no_openai_and_none_of_the_services():
    assert loaded_after("") == []


def test_a_runner_imports_openai_when_it_starts_and_not_under_traffic():
    code = "flywheel.TrainingRunner('http://127.0.0.1:9', reward=lambda run, reply: 1.0).start()"
    assert {"openai", "openai.resources.chat.completions"} <= set(loaded_after(code))


@pytest.mark.parametrize(
    "error",
    [
        flywheel.Refused(400, "reward", code="invalid", param="reward"),
        flywheel.Away(503, "busy", retry_after_s=2.0),
        flywheel.NothingKnown("none", receipts=[{"msg_id": "m", "state": "unknown"}]),
        flywheel.UnsafeTool("refund", "it writes"),
        flywheel.ConfigError("reward=nan"),
    ],
)
def test_an_error_is_the_same_in_another_process(error):
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
