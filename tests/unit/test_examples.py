"""The shape that all examples share, read from their files: their worlds need not be installed."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from examples import run, serving
from examples.tiny_model import Demonstration, Recipe, folder_of, make
from services.commands.demo import examples, run_example
from shared.config import load_config
from shared.errors import StartupError
from tests.support.processes import REPOSITORY
from tests.support.servers import wait_until

NAMES = sorted(examples())
FILES = [file for name in NAMES for file in sorted((REPOSITORY / "examples" / name).glob("*.py"))]


def imported(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{one.name}" for one in node.names}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_its_parts_and_a_short_program(name):
    folder = REPOSITORY / "examples" / name
    assert {"world.py", "agent.py", "reward.py", "tiny.py", "__main__.py"} <= {file.name for file in folder.iterdir()}
    assert len((folder / "__main__.py").read_text().splitlines()) <= 60
    assert examples()[name]


@pytest.mark.parametrize(
    "file", [file for file in FILES if file.stem.startswith(("agent", "world", "reward"))], ids=str
)
def test_agents_worlds_and_rewards_know_nothing_of_the_tiny_model_or_the_services(file):
    for name in imported(file):
        assert not name.startswith(("services", "shared", "explorer_service", "trainer_service"))
        assert not name.startswith(("torch", "transformers", "examples.tiny_model", "examples.run", "examples.serving"))
        assert "tiny" not in name.split(".")


def test_an_unknown_example_is_refused_with_the_known_names():
    with pytest.raises(StartupError, match="frozen_lake"):
        run_example("nope", [])


def stop() -> dict[str, object]:
    raise KeyboardInterrupt


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


@contextlib.contextmanager
def running(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[serving.Running]:
    """A program in the place of `flywheel up`, which is ready at once."""
    (tmp_path / "python").write_text(f"#!{sys.executable}\n{program}")
    (tmp_path / "python").chmod(0o700)
    monkeypatch.setattr(serving, "product_python", lambda: str(tmp_path / "python"))
    monkeypatch.setattr(serving, "READY_TIMEOUT_S", 60.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            with serving.running(f"http://127.0.0.1:{server.server_port}", tmp_path / "flywheel.yaml") as found:
                yield found
        finally:
            server.shutdown()


def test_an_example_reaches_its_processes_also_where_the_environment_names_a_proxy(tmp_path, monkeypatch):
    # the tests may have been started with SIGINT ignored, which a shell script could not undo
    sleeping = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL); time.sleep(600)"
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.com")
    monkeypatch.delenv("no_proxy", raising=False)
    with running(sleeping, tmp_path, monkeypatch):
        assert os.environ["no_proxy"] == "example.com,127.0.0.1"
    assert "no_proxy" not in os.environ


NEEDS_TWO_SIGNALS = """
import signal, time
signals = []
signal.signal(signal.SIGINT, lambda *_: signals.append(signal.SIGINT))
print("begun", flush=True)
while len(signals) < 2:
    time.sleep(0.05)
print("ended", flush=True)
"""


def test_a_second_signal_ends_what_the_first_one_did_not(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "STOP_S", (0.5, 300.0))
    with running(NEEDS_TWO_SIGNALS, tmp_path, monkeypatch) as found:
        wait_until(lambda: found.lines() == ["begun"])
    assert (found.lines(), found.process.returncode) == (["begun", "ended"], 0)


def test_without_a_proxy_the_environment_is_left_as_it_is(monkeypatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    with serving.loopback_without_proxy():
        assert "no_proxy" not in os.environ


def test_an_example_that_ctrl_c_stops_is_one_line(capsys):
    assert run.in_one_line("frozen_lake", stop) == 130
    assert capsys.readouterr().err == "frozen_lake: stopped\n"


@pytest.mark.parametrize("inside", [".", "folder"])
def test_a_root_of_an_example_that_is_a_file_is_refused(inside, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match=r"--root '.*file.*' cannot be emptied or made \(Not a directory\); name"):
        serving.make_root(tmp_path / "file" / inside)


def test_settings_of_the_environment_are_not_an_example_s(tmp_path, monkeypatch):
    monkeypatch.setenv("FLYWHEEL_EXPLORER__PORT", "8020")
    monkeypatch.setenv("FLYWHEEL_ROOT_DIR", str(tmp_path / "production"))
    monkeypatch.setenv("FLYWHEEL_DATABASE_URL", "postgresql://u:p@production/flywheel")
    url, file = serving.write_config(tmp_path, tmp_path / "model", {}, {})
    config = load_config(file, serving._environment())
    assert url == f"http://127.0.0.1:{config.explorer.port}" and config.root == tmp_path / "data"
    assert config.database_url is None


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}}}}}
TALK = Demonstration(
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "not learned", "learn": False},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "done"},
    ],
    [TOOL],
)


def test_the_assistants_messages_alone_are_learned():
    from examples.tiny_model import _encode, make_tokenizer

    tokenizer = make_tokenizer(Recipe([TALK], vocabulary=300, has_tools=True))
    ids, labels = _encode(tokenizer, TALK)
    learned = tokenizer.decode([label for label in labels if label != -100])
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert learned == f"{call}done<|im_end|>"
    assert tokenizer.decode(ids).startswith("<|im_start|>tools\nadd a\n<|im_end|>\n<|im_start|>user\none<|im_end|>")


def test_the_gradients_of_a_batch_in_parts_are_those_of_the_batch():
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from examples.tiny_model import _gradients

    torch.manual_seed(1)
    size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=50, num_key_value_heads=2, tie_word_embeddings=True, **size))
    draw = random.Random(1)
    rows = []
    for length in (3, 9, 5, 12):
        ids = [draw.randrange(50) for _ in range(length)]
        rows.append((ids, [-100, *(draw.choice((one, -100)) for one in ids[1:-1]), ids[-1]]))
    padded = [[(ids + [0] * 12)[:12], (labels + [-100] * 12)[:12]] for ids, labels in rows]
    inputs, labels = torch.tensor(padded).unbind(1)
    model(input_ids=inputs, labels=labels).loss.backward()
    learned = int((labels != -100).sum())
    parts = [_gradients(model, 0, part) for part in (rows[:3], rows[3:])]
    for parameter, *gradients in zip(model.parameters(), *parts, strict=True):
        torch.testing.assert_close(sum(gradients) / learned, parameter.grad)


def test_operations_of_a_warm_start_have_a_thread_each_and_others_have_as_many_as_before(tmp_path):
    import torch

    before, seen = torch.get_num_threads(), []
    recipe = Recipe([TALK], vocabulary=300, steps=2, batch=2, width=64, heads=2, has_tools=True)
    make(recipe, tmp_path, lambda *_: seen.append(torch.get_num_threads()))
    assert (seen[1:], torch.get_num_threads()) == ([1, 1], before)


def test_a_model_is_the_same_each_time_and_its_recipe_can_be_written(tmp_path):
    recipe = Recipe([TALK], vocabulary=300, steps=2, batch=2, width=64, heads=2, has_tools=True)
    recipe.dump(tmp_path / "recipe.json")
    assert asdict(Recipe.load(tmp_path / "recipe.json")) == json.loads(json.dumps(asdict(recipe)))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        make(Recipe.load(tmp_path / "recipe.json"), tmp_path / name, lambda *_: None)
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_the_warm_start_has_the_tokens_that_are_served(tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    from examples import tiny_model

    used = []
    monkeypatch.setattr(tiny_model, "_warm_start", lambda recipe, model, tokenizer, *rest: used.append(tokenizer))
    make(Recipe([TALK], vocabulary=300, width=64, heads=2), tmp_path, lambda *_: None)
    text = "one 45 ```Down``` done"
    assert used[0](text)["input_ids"] == AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]


def test_the_cache_folder_is_named_by_programs_and_variant(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = {folder_of("math"), folder_of("math", "agentscope 2"), folder_of("gsm8k")}
    assert len(folders) == 3
    assert folder_of("math") in folders
    assert all(folder.parent == tmp_path / "flywheel" for folder in folders)
