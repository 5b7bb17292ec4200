"""Rows of Trinity's files for sft and dpo, written as `flywheel convert-config` says, are imported and trained on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from services.trinity.convert import convert
from services.trinity.key import Given
from shared.config import Config, TrainerConfig
from shared.experience import Experience
from tests.support.lessons import stands
from tests.support.processes import run_here
from trainer_service.export import read_export

ROWS = "buffer.trainer_input.experience_buffer."
ASKED, ANSWER = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "It is 2."}
WRONG = {"role": "assistant", "content": "3"}
SYSTEM = {"role": "system", "content": "Be brief."}
MORE = [ASKED, WRONG, {"role": "user", "content": "No."}, ANSWER]
PLAIN = {"prompt": ASKED["content"], "response": ANSWER["content"], "system": SYSTEM["content"]}
PAIR = {"prompt": ASKED["content"], "chosen": ANSWER["content"], "rejected": WRONG["content"]}
PAIR_OF_MESSAGES = {"message": [ASKED], "chosen": [ANSWER], "rejected": [WRONG]}
PLAINTEXT = {"prompt_type": "plaintext"}


class Engine:
    """Writes conversations as text, a token for each character, and gives each token the same logprob."""

    def __init__(self, *_: Any) -> None:
        pass

    async def tokenize(self, messages: list[Any], tools: Any, *, ends_with_reply: bool) -> list[int]:
        text = "".join(f"<{message['role']}>{message['content']}|" for message in messages)
        return [ord(character) for character in text + ("" if ends_with_reply else "<assistant>")]

    async def score(self, sequences: list[list[int]], model: str | None) -> list[list[float]]:
        return [[-1.0] * (len(token_ids) - 1) for token_ids in sequences]

    async def read_label(self, *, may_load: bool) -> None:
        return None


@pytest.fixture(autouse=True)
def _an_engine_that_tokenizes(monkeypatch):
    monkeypatch.setattr("services.samples.EngineAdmin", Engine)


def written(algorithm: str, form: dict[str, str], row: dict[str, Any], file: Path) -> Path:
    """The file with the row in the shape that the path's line shows."""
    keys = {"mode": "train", "algorithm.algorithm_type": algorithm, f"{ROWS}storage_type": "file", f"{ROWS}path": "x"}
    given = Given({"model.model_path": "/m", **keys, **{f"{ROWS}format.{name}": value for name, value in form.items()}})
    (remark,) = (line.remark for line in convert(given).lines if line.key == f"{ROWS}path")
    found = re.search(r" as (\{.*\}), where ", remark)
    assert found is not None
    content = row["chosen"][0]["content"] if isinstance(row.get("chosen"), list) else ""
    values = {**row, "format.system_prompt": form.get("system_prompt"), "content of chosen": content}
    text = re.sub("<([^<>]*)>", lambda name: json.dumps(values[name.group(1)]), found.group(1))
    file.write_text(text.replace("] + [", ", "))  # the sum of two lists of messages
    return file


def trained_on(config: Config, algorithm: str, file: Path) -> list[Experience]:
    """Import the file, export it with tokens, and return the rows that `flywheel train` reads from that."""
    asked = config.model_copy(update={"trainer": TrainerConfig(algorithm=algorithm)})
    assert run_here(asked, "import", str(file), "--commit") == 0
    export = file.with_name("export.jsonl")
    assert run_here(asked, "export", "--tokens", "--out", str(export)) == 0
    return read_export(export, asked, file.parent)


def texts(row: Experience) -> tuple[str, str]:
    prompt, reply = ("".join(map(chr, ids)) for ids in (row.tokens.prompt_ids, row.tokens.reply_ids))
    return prompt, reply


@pytest.mark.parametrize(
    ("form", "row", "prompt"),
    [
        ({"messages_key": "conversation"}, {"conversation": [ASKED, ANSWER]}, "<user>1 + 1?|<assistant>"),
        ({**PLAINTEXT, "system_prompt_key": "system"}, PLAIN, "<system>Be brief.|<user>1 + 1?|<assistant>"),
        ({**PLAINTEXT, "system_prompt": "Be kind."}, PLAIN, "<system>Be kind.|<user>1 + 1?|<assistant>"),
    ],
)
def test_a_demonstration_is_imported_and_its_reply_learned(form, row, prompt, ledger, config, tmp_path: Path):
    (one,) = trained_on(config, "sft", written("sft", form, row, tmp_path / "rows.jsonl"))
    assert texts(one) == (prompt, "It is 2.|") and [signal.kind for signal in one.signals] == ["demonstration"]
    assert stands(ledger, "state") == [("READY",)]


@pytest.mark.parametrize(("form", "row"), [(PLAINTEXT, PAIR), ({}, PAIR_OF_MESSAGES)])
def test_a_pair_is_imported_as_the_worse_reply_with_the_better_one_as_its_correction(
    form, row, ledger, config, tmp_path: Path
):
    (one,) = trained_on(config, "dpo", written("dpo", form, row, tmp_path / "rows.jsonl"))
    assert texts(one) == ("<user>1 + 1?|<assistant>", "3|")
    assert [(signal.kind, signal.text) for signal in one.signals] == [("correction", "It is 2.")]
    assert stands(ledger, "state") == [("READY",)]


def test_a_row_for_each_reply_of_a_conversation_has_them_all_learned_as_its_turns(ledger, config, tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": MORE[:end]}) + "\n" for end in (2, 4)))
    first, second = trained_on(config, "sft", file)
    assert (texts(first)[1], texts(second)[1]) == ("3|", "It is 2.|")
    assert first.conversation_id == second.conversation_id and second.parent_id == first.msg_id
