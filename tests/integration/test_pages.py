"""Every configuration on the pages of docs/algorithms/ in a short form: from feedback over HTTP to a version.

Two people, each with a key, say what an algorithm learns from to the real explorer, over a scripted engine; then the
real trainer starts on the page's own YAML. Replaced are the model, the teacher's URL and the size of a batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import select
from transformers import AutoTokenizer

from shared.config import Config
from shared.experience import Experience
from shared.ledger.queries import list_versions
from shared.ledger.tables import experiences
from tests.support.experiences import make_experiences
from tests.support.lives import Lives
from tests.support.processes import wait_for, write_config
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_teacher import ScriptedTeacher, as_vllm
from tests.support.servers import RunningExplorer, make_config
from tests.support.trained_roots import newest, open_ledger, weights
from trainer_service.algorithms.registry import PAGES

pytestmark = pytest.mark.usefixtures("patient_health")
DOCS = Path(__file__).parents[2] / "docs/algorithms"
BLOCKS = {page.stem: re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL) for page in DOCS.glob("*.md")}
# what the replies are worth: attempts at a task differ, whichever way the replies are parted into tasks
WORTH = [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
PEOPLE = ["anna", "ben"]  # and their keys
RUNS = 4  # of a task
REWARDS = {"ppo", "reinforce_pp", "spo", "grpo", "rloo", "step_grpo", "raft"}
TASKS = {"grpo", "rloo", "step_grpo"}


def test_every_algorithm_has_a_page_and_every_page_a_configuration():
    assert {*PAGES, "index", "surrogates"} == BLOCKS.keys()
    assert not [page for page, blocks in BLOCKS.items() if not blocks]


@pytest.fixture(scope="module")
def rows(model: Path) -> list[Experience]:
    """Two replies of the model to each prompt."""
    made = make_experiences(model, len(WORTH))
    prompts = [row.tokens.prompt_ids for row in made[::2] for _ in range(2)]
    return [replace(row, tokens=replace(row.tokens, prompt_ids=ids)) for row, ids in zip(made, prompts, strict=True)]


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    running = ScriptedEngine()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def teacher(model: Path) -> Iterator[ScriptedTeacher]:
    running = ScriptedTeacher(as_vllm(AutoTokenizer.from_pretrained(model)))
    yield running
    running.close()


def run_of(number: int, parts: set[str]) -> str:
    """Before the path of a chat, where tasks are attempted several times; the runs of step_grpo have two turns."""
    if not parts & TASKS:
        return ""
    turn_of = 2 if "step_grpo" in parts else 1
    return f"/run/t{number // (RUNS * turn_of)}/{number // turn_of}"


def said_of(number: int, names: list[str], parts: set[str]) -> dict[str, Any]:
    """What the algorithms learn from, as a body of feedback."""
    body: dict[str, Any] = {}
    if parts & REWARDS:
        body["reward"] = WORTH[number]
    if "kto" in parts:
        body["rating"] = "up" if WORTH[number] else "down"
    if "sft" in parts:
        body["correction"] = f"w22 w{30 + number}"
    if "dpo" in parts and number % 2:
        body["preferred_over"] = [names[number - 1]]
    if parts & {"hint", "distill"}:
        body["comment"] = f"w{1 + number} w2"
    return body


def use(engine: ScriptedEngine, rows: list[Experience], config: Config) -> list[str]:
    """Chats, feedback and a commit. Returns the messages of which something was said."""
    explorer, parts, names = RunningExplorer(config).wait_ready(), set(config.trainer.parts), []

    def post(path: str, body: dict[str, Any], who: str) -> Any:
        return explorer.http.post(path, json=body, headers={"Authorization": f"Bearer {who}"}).raise_for_status().json()

    for number, row in enumerate(rows):
        script, tokens = engine.script, row.tokens
        script.prompt_ids, script.reply_ids = tokens.prompt_ids.tolist(), tokens.reply_ids.tolist()
        script.logprobs = tokens.logprobs.tolist()
        chat = {"messages": [{"role": "user", "content": f"hello {number}"}]}
        names.append(post(f"{run_of(number, parts)}/v1/chat/completions", chat, PEOPLE[0])["id"])
    said = [said_of(number, names, parts) for number in range(len(rows))]
    spoken_of = {name: body for name, body in zip(names, said, strict=True) if body}
    for number, (name, body) in enumerate(spoken_of.items()):
        post("/feedback", {"msg_ids": [name], **body}, PEOPLE[number % 2])
    assert post("/commit", {}, PEOPLE[0])["ready"] == len(spoken_of)
    explorer.stop()
    return list(spoken_of)


@pytest.mark.parametrize(
    "block", [pytest.param(b, id=f"{page}-{n}") for page, found in BLOCKS.items() for n, b in enumerate(found)]
)
def test_a_version_comes_of_what_people_say_with_the_page_s_configuration(
    block, tmp_path, model, lives: Lives, engine, teacher, rows
):
    tree = yaml.safe_load(block)
    tree["root_dir"], tree["model"]["path"] = str(tmp_path), str(model)
    if "distill" in tree["trainer"]:
        tree["trainer"]["distill"]["url"] = teacher.url
    keys = [{"sha256": sha256(name.encode()).hexdigest(), "role": "admin", "name": name} for name in PEOPLE]
    explorer = make_config(tmp_path, [engine.url], keys=keys).explorer
    names = use(engine, rows, Config.model_validate(tree).model_copy(update={"explorer": explorer}))
    tree["trainer"] |= {"batch_size": len(names), "poll_interval_s": 0.02, "cpu_threads": 1}
    write_config(Config.model_validate(tree), tmp_path / "flywheel.yaml")
    with lives.begin(["trainer", "-c", str(tmp_path / "flywheel.yaml")], tmp_path / "trainer.log") as trainer:
        wait_for(lambda: newest(tmp_path) == 1 or not trainer.alive, "a version", 240, 0.02)
        assert trainer.stop() == 0, trainer.output()
    ledger = open_ledger(tmp_path)
    with ledger.read() as connection:
        found = connection.execute(
            select(experiences.c.msg_id, experiences.c.consumed_version).order_by(experiences.c.id)
        ).all()
        versions = {row.version: row.parent for row in list_versions(connection)}
    ledger.close()
    assert [name for name, version in found if version == 1] == names
    assert versions[1] == 0 and weights(tmp_path, 1) != weights(tmp_path, 0), trainer.output()
