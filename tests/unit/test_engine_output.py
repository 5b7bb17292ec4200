"""Why vLLM ended, as its log says it, and where that log is afterwards. The lines are vLLM 0.32's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.engine.output import EngineOutput
from tests.support.processes import wait_for

API = "(APIServer pid=7) ERROR 11-25 23:52:52 "
CORE = "(EngineCore pid=8) ERROR 11-25 23:52:52 "
OF_A_REQUEST = [
    f"{API}[hermes_tool_parser.py:117] Error in extracting tool call from response.",
    f"{API}[hermes_tool_parser.py:117] Traceback (most recent call last):",
    f"{API}[hermes_tool_parser.py:117] json.decoder.JSONDecodeError: Expecting value: line 2 column 35 (char 35)",
]
EXIT = (
    "(APIServer pid=7) WARNING 11-25 23:52:52 [core_client.py:817] [shutdown] MPClient: engine core exited "
    "unexpectedly; starting cleanup"
)
DEAD = (
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root"
)
OF_ALL_REQUESTS = [f"{API}[async_llm.py:906] AsyncLLM output_handler failed.", f"{API}[async_llm.py:906] {DEAD}"] + [
    f"{API}[vllm_error.py:54] {DEAD}"
] * 3000
OF_THE_CORE = [
    f"{CORE}[core.py:1512] EngineCore encountered a fatal error.",
    f"{CORE}[core.py:1512] Traceback (most recent call last):",
    f"{CORE}[core.py:1512] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
]
OF_A_WORKER = [
    f"{CORE}[core.py:1512] EngineCore encountered a fatal error.",
    f"{CORE}[core.py:1512] RuntimeError: Worker failed with error 'a tensor is too large', please check the stack",
]
AT_THE_END = ["See https://nanobind.readthedocs.io/en/latest/refleaks.html", "  warnings.warn('resource_tracker:"]
UNCAUGHT = [
    "Traceback (most recent call last):",
    '  File "api_server.py"',
    "OSError: [Errno 28] No space left on device",
]


def reason_of(lines: list[str], file: Path, *, in_service: bool) -> str:
    """The reason that is given when vLLM has printed these lines and ended."""
    program = "import sys; sys.stdout.write(sys.stdin.read())"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        output = EngineOutput(process.stdout, file)
        assert process.stdin is not None
        process.stdin.write("".join(f"{line}\n" for line in lines).encode())
        process.stdin.close()
        assert process.wait(240) == 0
        return output.reason(in_service=in_service)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([EXIT, *OF_ALL_REQUESTS, *AT_THE_END], "engine core exited unexpectedly"),
        ([*OF_ALL_REQUESTS, *AT_THE_END], "EngineDeadError: EngineCore encountered an issue"),
        (
            [*OF_THE_CORE, EXIT, *OF_ALL_REQUESTS],
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (",
        ),
        ([EXIT, *OF_ALL_REQUESTS[:9], *OF_A_REQUEST, *OF_THE_CORE], "torch.OutOfMemoryError: CUDA out of memory"),
        ([*OF_A_WORKER, EXIT, *OF_ALL_REQUESTS], "RuntimeError: Worker failed with error 'a tensor is too large'"),
        ([*UNCAUGHT, *AT_THE_END], "OSError: [Errno 28] No space left on device"),
        (["Killed"], "its log names no error and ends with: Killed ("),
    ],
)
def test_the_reason_for_an_end_in_service_is_the_fatal_error_not_a_request_error(lines, reason, tmp_path):
    said = reason_of([*OF_A_REQUEST * 20, *lines], tmp_path / "vllm-e0.log", in_service=True)
    assert reason in said and "JSONDecodeError" not in said


def test_why_vllm_could_not_start_is_the_first_error_that_is_no_consequence(tmp_path):
    lines = [
        "loading",
        f"{CORE}[core.py:1] ValueError: no such layer",
        f"{API}RuntimeError: Engine core initialization failed.",
    ]
    assert reason_of(lines, tmp_path / "vllm-e0.log", in_service=False).startswith("ValueError: no such layer (")


def test_what_vllms_own_subprocess_lacks_is_named(tmp_path):
    """vLLM imports a model's code in a subprocess first."""
    lines = [
        f"{API}[registry.py:1120] subprocess.CalledProcessError: Command '[...]' returned non-zero exit status 1.",
        f"{API}[registry.py:1120] RuntimeError: Error raised in subprocess:",
        f"{API}[registry.py:1120] ModuleNotFoundError: No module named 'torchvision'",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, Model architectures ['Qwen3_5ForCausalLM'] failed to be inspected.",
    ]
    said = reason_of(lines, tmp_path / "vllm-e0.log", in_service=False)
    assert said.startswith("ModuleNotFoundError: No module named 'torchvision'; vLLM imports it for models that also")


def test_the_log_of_the_previous_run_is_kept_and_named(tmp_path):
    file, previous = tmp_path / "logs" / "vllm-e0.log", tmp_path / "logs" / "vllm-e0.previous.log"
    for run in ("first", "second", "third"):
        said = reason_of([run], file, in_service=True)
        assert file.read_text() == f"{run}\n"
        assert str(file) in said and str(previous) in said
    assert previous.read_text() == "second\n"
    assert sorted(tmp_path.rglob("*.log")) == [file, previous]


def test_a_log_does_not_grow_beyond_a_size_while_vllm_runs_for_months(tmp_path, monkeypatch):
    monkeypatch.setattr("services.engine.output._MOST_BYTES", 1000)
    file, lines = tmp_path / "vllm-e0.log", [f"line {number:04}" for number in range(1000)]
    reason_of(lines, file, in_service=True)
    earlier, later = (tmp_path / "vllm-e0.previous.log").read_text(), file.read_text()
    kept = (earlier + later).splitlines()
    assert kept == lines[-len(kept) :]
    assert 900 < len(earlier) <= 1000 and 0 < len(later) <= 1000


def test_a_log_that_cannot_be_kept_does_not_hold_vllm_up(tmp_path):
    file = tmp_path / "vllm-e0.log"
    (tmp_path / "vllm-e0.previous.log" / "a folder").mkdir(parents=True)
    for run in ("first", "second"):
        assert reason_of([run], file, in_service=True).startswith(f"its log names no error and ends with: {run} (")
    assert file.read_text() == "second\n"


def test_a_log_that_is_copied_and_emptied_while_vllm_writes_goes_on_at_its_start(tmp_path):
    file = tmp_path / "vllm-e0.log"
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        output = EngineOutput(process.stdout, file)
        assert process.stdin is not None
        process.stdin.write(b"before\n")
        process.stdin.flush()
        wait_for(lambda: file.exists() and file.read_bytes() == b"before\n", "the first line", 60)
        os.truncate(file, 0)  # as logrotate's copytruncate does
        process.stdin.write(b"after\n")
        process.stdin.close()
        assert process.wait(240) == 0
        output.reason(in_service=True)  # waits for the end
        assert file.read_bytes() == b"after\n"
