"""What the command says of a file of rows that Trinity's trainer reads: what to write, import and train."""

from __future__ import annotations

import pytest

from services.trinity.convert import Line, convert
from services.trinity.key import Fate, Given
from services.trinity.read import read

ROWS = "buffer.trainer_input.experience_buffer."
FORMAT = f"{ROWS}format."
MULTI_TURN = f"{FORMAT}enable_concatenated_multi_turn"


def lines(algorithm: str = "sft", storage: str = "file", mode: str | None = "train", **keys: object) -> dict[str, Line]:
    """The lines for a trainer's file of rows with these keys of its format."""
    whole = {"model.model_path": "/m", "mode": mode, "algorithm.algorithm_type": algorithm, "buffer.total_epochs": 3}
    rows = {f"{ROWS}storage_type": storage, f"{ROWS}path": "rows.parquet"}
    given = Given({**whole, **rows, **{FORMAT + name: value for name, value in keys.items()}})
    return {line.key: line for line in convert(given).lines}


def messages(**said: str) -> str:
    """The messages of a row to write: a column for each role."""
    return ", ".join(f'{{"role": "{role}", "content": <{column}>}}' for role, column in said.items())


@pytest.mark.parametrize(
    ("keys", "shape"),
    [
        ({}, '{"messages": <message>}'),
        (
            {"prompt_type": "messages", "messages_key": "conversation", "tools_key": "functions"},
            '{"messages": <conversation>, "tools": <functions>}',
        ),
        ({"prompt_type": "PLAINTEXT"}, f'{{"messages": [{messages(user="prompt", assistant="response")}]}}'),
        (
            {"prompt_type": "plaintext", "prompt_key": "q", "response_key": "a", "system_prompt": "Be brief."},
            f'{{"messages": [{messages(system="format.system_prompt", user="q", assistant="a")}]}}',
        ),
    ],
)
def test_the_line_of_a_file_of_demonstrations_shows_a_row_that_an_import_reads(keys, shape):
    line = lines(**keys)[f"{ROWS}path"]
    assert line.changes_training and f" rows.parquet into a .jsonl file as {shape}, " in line.remark
    assert "`flywheel engine` runs" in line.remark
    assert "`flywheel import -c flywheel.yaml FILE --commit`" in line.remark


@pytest.mark.parametrize(
    ("keys", "shape"),
    [
        (
            {"prompt_type": "plaintext", "system_prompt_key": "rules", "chosen_key": "good", "rejected_key": "bad"},
            f'{{"messages": [{messages(system="rules", user="prompt", assistant="bad")}], '
            '"signals": [{"kind": "correction", "text": <good>}]}',
        ),
        (
            {},
            '{"messages": <message> + <rejected>, "signals": [{"kind": "correction", "text": <content of chosen>}]}',
        ),
    ],
)
def test_the_line_of_a_file_of_preferences_shows_the_worse_reply_with_the_better_one_as_its_correction(keys, shape):
    assert f" as {shape}, " in lines("dpo", **keys)[f"{ROWS}path"].remark


@pytest.mark.parametrize(
    "key",
    ["prompt_type", "prompt_key", "response_key", "system_prompt_key", "system_prompt", "messages_key", "tools_key",
     "chosen_key", "rejected_key"],
)  # fmt: skip
def test_a_key_of_a_file_s_format_is_one_that_the_line_of_the_path_names(key):
    line = lines(**{key: "x"})[FORMAT + key]
    assert line.fate is Fate.NO_COUNTERPART and "path" in line.remark and not line.changes_training
    assert lines(storage="queue", **{key: "x"})[FORMAT + key].fate is Fate.NOT_NEEDED


@pytest.mark.parametrize("key", ["image_key", "video_key", "chat_template", "enable_thinking"])
def test_a_key_of_a_file_s_format_that_an_import_does_not_have_is_no_counterpart(key):
    assert lines(**{key: "x"})[FORMAT + key].fate is Fate.NO_COUNTERPART


def test_to_learn_every_reply_of_a_conversation_is_a_row_for_each_and_marked():
    line = lines(enable_concatenated_multi_turn=True)[MULTI_TURN]
    assert line.changes_training and "write a row for each reply" in line.remark


@pytest.mark.parametrize(
    ("algorithm", "storage", "keys"),
    [
        ("sft", "file", {"enable_concatenated_multi_turn": False}),
        ("sft", "file", {"enable_concatenated_multi_turn": True, "prompt_type": "plaintext"}),
        ("dpo", "file", {"enable_concatenated_multi_turn": True}),
        ("sft", "queue", {"enable_concatenated_multi_turn": True}),
    ],
)
def test_one_reply_of_a_conversation_needs_no_more_rows(algorithm, storage, keys):
    assert lines(algorithm, storage, **keys)[MULTI_TURN].fate is Fate.NOT_NEEDED


@pytest.mark.parametrize("mode", ["both", "colocate", None, "explore"])
def test_a_file_that_no_trainer_reads_is_not_imported(mode):
    found = lines("grpo", mode=mode, enable_concatenated_multi_turn=True, prompt_key="q")
    for key in (f"{ROWS}path", MULTI_TURN, f"{FORMAT}prompt_key"):
        assert found[key].fate is Fate.NOT_NEEDED, key


def test_the_trainer_of_a_pair_reads_its_file(tmp_path):
    explorer, trainer = tmp_path / "explorer.yaml", tmp_path / "trainer.yaml"
    explorer.write_text("mode: explore\nmodel: {model_path: /m}\n")
    rows = "{storage_type: file, path: rows.jsonl}"
    trainer.write_text(
        "mode: train\nalgorithm: {algorithm_type: sft}\nmodel: {model_path: /m}\n"
        f"buffer: {{trainer_input: {{experience_buffer: {rows}}}}}\n"
    )
    given, _ = read([explorer, trainer], {})
    (line,) = (line for line in convert(given).lines if line.key == f"{ROWS}path")
    assert line.changes_training and '{"messages": <message>}' in line.remark


def test_several_passes_over_the_rows_are_made_on_an_export_of_the_import_by_one_rank():
    line = lines()["buffer.total_epochs"]
    export, train = "`flywheel export -c flywheel.yaml --tokens --out rows.jsonl`", "trainer.ranks: 1"
    assert line.changes_training and export in line.remark and train in line.remark
    assert "`flywheel train -c flywheel.yaml --from rows.jsonl --epochs 3`" in line.remark


def test_a_file_of_rows_in_the_old_layout_is_imported_too():
    old = {"buffer.train_dataset.storage_type": "file", "buffer.train_dataset.path": "rows.jsonl"}
    keys = {"model.model_path": "/m", "trainer.algorithm_type": "sft", "mode": "train", **old}
    (line,) = convert(Given(keys)).lost
    assert line.key == "buffer.train_dataset.path" and '{"messages": <message>}' in line.remark
