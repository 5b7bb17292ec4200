"""Decoders are built when their module is imported, which one thread does.

msgspec prepares a type of ours when it is first decoded, and another thread may then see it half prepared: the process
dies of a segmentation fault.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

from tests.support.processes import REPOSITORY
from tests.support.servers import write_scripted_version

PACKAGES = ("explorer_service", "trainer_service", "services", "shared")
PROCESSES, THREADS = 8, 4
READ_AT_ONCE = f"""
import gc, sys, threading
from pathlib import Path
from shared.versions import read_manifest

start = threading.Barrier({THREADS})

def read():
    start.wait()
    read_manifest(Path(sys.argv[1]))

sys.setswitchinterval(1e-6)
gc.set_threshold(1)
threads = [threading.Thread(target=read) for _ in range({THREADS})]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_read_their_first_manifest_at_once(tmp_path):
    folder = write_scripted_version(tmp_path, 0, -1.0)
    command = [sys.executable, "-c", READ_AT_ONCE, str(folder)]
    ended = [subprocess.run(command, check=False, cwd=REPOSITORY, capture_output=True) for _ in range(PROCESSES)]
    assert [process.returncode for process in ended] == [0] * PROCESSES
    assert not any(process.stderr for process in ended)


def built_late(node: ast.AST, inside: bool = False) -> Iterator[int]:
    """The lines of calls within functions that prepare a type: `decode(…, type=…)` and `Decoder(…)`."""
    inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    called = ast.unparse(node.func) if inside and isinstance(node, ast.Call) else ""
    if called.endswith(".Decoder") or (called.startswith("msgspec.") and "type=" in ast.unparse(node)):
        yield node.lineno
    for child in ast.iter_child_nodes(node):
        yield from built_late(child, inside)


def test_no_function_builds_a_decoder():
    files = [file for package in PACKAGES for file in (REPOSITORY / package).rglob("*.py")]
    found = {str(file.relative_to(REPOSITORY)): list(built_late(ast.parse(file.read_text()))) for file in files}
    assert {file: lines for file, lines in found.items() if lines} == {}
