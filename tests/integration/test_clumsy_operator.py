"""What an operator may get wrong is one line that says what to do, and changes nothing."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from services.cli import build_parser, main
from services.supervisor import Supervisor
from shared.config import load_config
from shared.errors import CannotRollBack, CannotServe, ConfigError, LedgerError, StartupError
from shared.ledger import transitions
from shared.ledger.connect import Ledger
from tests.support.experiences import record_ready, rows
from tests.support.processes import run_here
from tests.support.servers import make_config

NEEDS_A_LEDGER = [
    ["status"],
    ["versions"],
    ["rewards"],
    ["erase", "--task", "t"],
    ["export", "--out", "rows.jsonl"],
    ["archive", "--to", "archive", "--older-than-days", "1"],
    ["export-model", "--version", "1", "--to", "model"],
    ["migrate", "--to", "sqlite:///copy.sqlite3"],
]


@pytest.mark.parametrize("call", NEEDS_A_LEDGER, ids=lambda call: call[0])
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_without_a_ledger_nothing_is_made_up(database, call, tmp_path: Path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    url = request.getfixturevalue("postgres").new_database() if database == "postgresql" else None
    config = make_config(tmp_path / "root", ["http://127.0.0.1:1"], database_url=url)
    with pytest.raises(LedgerError, match="holds no ledger; correct root_dir or database_url, or start `flywheel up`"):
        run_here(config, *call)
    assert not (tmp_path / "root/ledger.sqlite3").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["root"]


@pytest.mark.parametrize("scope", [("--message", "m0#1"), ("--task", "unknown"), ("--key", "k", "--task", "")])
def test_an_erasure_that_finds_nothing_fails(config, ledger, scope):
    record_ready(ledger, rows(1))
    with pytest.raises(StartupError, match=r"no row has .*nothing was erased"):
        run_here(config, "erase", *scope)


def test_what_is_printed_into_a_pipe_is_whole(config, ledger, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    reason = "it was rejected for a reason that is longer than a line of a terminal is wide, and ends in here"
    with ledger.write() as connection:
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
        transitions.publish(connection, version=1, parent=0, kind="full", step=1)
        transitions.reject_version(connection, 1, reason, by="engine e0")
        about = {"step": 1, "version": 1, "state_path": None, "state_sha256": None}
        transitions.announce_trainer(connection, name="a-trainer-of-a-name-that-takes-most-of-a-line", **about)
    assert run_here(config, "versions") == 0
    shown = capsys.readouterr().out
    assert re.search(r"version .* parent .* kind .* state .* since .* published .* in service .* remarks ", shown)
    assert re.search(rf" REJECTED .*(\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d .*){{2}} {reason} ", shown)
    assert run_here(config, "status") == 0
    assert re.search(r"^trainer   a-trainer-of.* heartbeat \d+ s ago$", capsys.readouterr().out, re.MULTILINE)


def test_what_looks_like_markup_is_shown_as_it_is(config, ledger, capsys):
    with ledger.write() as connection:
        transitions.publish(connection, version=0, parent=None, kind="full", step=0)
    assert run_here(config, "versions", "tag", "0", "[/b] [red]") == 0
    assert run_here(config, "versions") == 0
    assert "tag [/b] [red]" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", ["tag 0 -c FILE best", "tag -c FILE 0 best", "-c FILE tag 0 best", "tag 0 best -c FILE"]
)
def test_the_option_for_the_file_may_stand_anywhere(words):
    args = build_parser().parse_args(["versions", *words.split()])
    assert (args.config, args.action, args.version, args.name) == ("FILE", "tag", 0, "best")


@pytest.mark.parametrize("words", ["-c FILE -- -rows.jsonl", "-c FILE --commit -- -rows.jsonl"])
def test_a_file_whose_name_begins_with_a_hyphen_is_named_after_two_hyphens(words):
    args = build_parser().parse_args(["import", *words.split()])
    assert (args.config, args.file) == ("FILE", Path("-rows.jsonl"))


def test_a_version_and_a_tag_fit_the_ledger(config, ledger):
    with pytest.raises(ConfigError, match="versions retry 99999999999: there is no such version"):
        run_here(config, "versions", "retry", "99999999999")
    with pytest.raises(ConfigError, match="has 201 characters; give it at most 200"):
        run_here(config, "versions", "tag", "0", "t" * 201)


@pytest.mark.parametrize("call", [("retry", "3"), ("untag", "3"), ("tag", "3", "best")], ids=lambda call: call[0])
def test_a_version_that_does_not_exist_is_named_as_such(config, ledger, call):
    with pytest.raises(StartupError, match=r"version 3 does not exist; see `flywheel versions`"):
        run_here(config, "versions", *call)


def test_a_new_ledger_has_no_version_to_go_back_to_or_to_promote(config, ledger):
    with pytest.raises(CannotRollBack, match="there is no version yet; see `flywheel versions`"):
        run_here(config, "rollback")
    for call in (("promote", "3"), ("traffic", "3=1")):
        with pytest.raises(CannotServe, match="version 3 does not exist; on disk: none"):
            run_here(config, *call)


@pytest.mark.parametrize(
    "url", ["nonsense", "mysql://u:secret@h/db", "postgresql://u:se@cret@/x@:1/db", "sqlite:relative"]
)
def test_a_ledger_is_copied_to_a_database_that_can_be_told(config, ledger, url):
    with pytest.raises(ConfigError, match="--to: ") as refused:
        run_here(config, "migrate", "--to", url)
    assert "secret" not in str(refused.value) and "cret@" not in str(refused.value)


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf"])
def test_a_demo_lasts_a_time(minutes, monkeypatch, capsys):
    monkeypatch.setattr("services.demo.run_demo", lambda **_: 0)
    assert main(["demo", "--minutes", minutes]) == 2
    assert capsys.readouterr().err.startswith(f"flywheel: --minutes {minutes} is no time; give a number above 0")
    assert main(["demo", "--minutes", "0.5"]) == 0


@pytest.mark.parametrize("option", [["--minutes", "1"], ["--seed", "3"], ["--root", "here"], ["--json"]], ids=str)
def test_an_option_before_the_name_of_an_example_is_not_ignored(option, monkeypatch, capsys):
    monkeypatch.setattr("services.commands.demo.run_example", lambda *_: pytest.fail("it was started without it"))
    assert main(["demo", *option, "frozen_lake"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"flywheel: {option[0]} stands before 'frozen_lake'") and said.count("\n") == 1


def test_up_needs_a_part_to_run(config):
    (Path(config.model.path)).mkdir(parents=True)
    (Path(config.model.path) / "config.json").write_text("{}")
    without = [word for part in ("engines", "explorer", "trainer") for word in ("--without", part)]
    with pytest.raises(ConfigError, match="nothing is left to run"):
        run_here(config, "up", *without)


def test_up_needs_no_port_for_an_explorer_that_it_leaves_out(config, monkeypatch):
    (Path(config.model.path)).mkdir(parents=True)
    (Path(config.model.path) / "config.json").write_text("{}")
    begun: list[str] = []

    def run(self: Supervisor) -> int:
        begun.extend(child.name for child in self._children)
        return 0

    monkeypatch.setattr(Supervisor, "run", run)
    with socket.create_server(("127.0.0.1", 0)) as explorer:  # one that is run by itself
        port = explorer.getsockname()[1]
        config = config.model_copy(update={"explorer": config.explorer.model_copy(update={"port": port})})
        assert run_here(config, "up", "--without", "explorer", "--without", "engines") == 0
        assert begun == ["trainer"]
        with pytest.raises(StartupError, match=r"explorer\.port"):
            run_here(config, "up", "--without", "engines")


def written(folder: Path, text: str) -> Path:
    file = folder / "flywheel.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model:\n  name: 2024-13-45", "line 2, column 9: a value is no date or number, and looks like one; correct"),
        ("model: !!int abc", "line 1, column 8: a value is no date or number"),
        ("[" * 5000, "is nested too deeply"),
        ("model: {path: x, lora: {rank: 8}}", "model.lora is set, and model.kind is full; set model.kind: lora"),
        ('root_dir: "a\\0b"\nmodel: {path: x}', "root_dir holds NUL"),
        ('engine: {staging_dir: "a\\0b"}\nmodel: {path: x}', "engine.staging_dir holds NUL"),
        (
            "model: {path: ~nobody-here/m}",
            "model.path='~nobody-here/m': nobody-here has no home folder here; write the",
        ),
        ("root_dir: ~nobody-here/d\nmodel: {path: x}", "root_dir='~nobody-here/d': nobody-here has no home folder"),
        ("model:\n\tpath: x", r"column 1: found character '\t' that cannot start any token; indent with spaces"),
        ("model: {path: x", "expected ',' or '}', but got '<stream end>'; correct that line"),
        ("model: {path: x}\n# \x1b[0m", "is not YAML at line 2: it holds the invisible character U+001B; delete it"),
        (
            "model: {path: x, kind: lora, lora: {targets: q_proj}}",
            "model.lora.targets='q_proj' names no layers; write all-linear, or a list such as [q_proj, v_proj]",
        ),
        ("model: {path: x, kind: lora, lora: {targets: [lm_head]}}", "model.lora.targets: 'lm_head' is an embedding"),
        ("model: {path: x, kind: lora, lora: {dropout: 0.1}}", "model.lora.dropout=0.1 would score each batch by"),
        (
            "model: {path: x}\ntrainer: {algorithm: hint, hint: {neutral_reward: none}}",
            "trainer.hint.neutral_reward='none': input should be a valid number",
        ),
    ],
)
def test_a_file_that_yaml_or_we_cannot_take_is_one_line(text, said, tmp_path: Path, capsys):
    assert main(["status", "-c", str(written(tmp_path, text))]) == 2
    line = capsys.readouterr().err
    assert said in line and line.count("\n") == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_an_explorer_on_the_port_of_its_engine_is_refused(host, tmp_path: Path):
    keys = "keys: [{key_env: A, role: admin}]"
    text = f"model: {{path: x}}\nexplorer: {{host: {host}, port: 8101, {keys}}}"
    with pytest.raises(
        ConfigError, match=r"explorer.port=8101 is the port of explorer.engines 'e0'; give each its own"
    ):
        load_config(written(tmp_path, text), {})


def test_an_explorer_and_an_engine_may_have_one_port_on_two_addresses(tmp_path: Path):
    engines = "engines: [{name: e0, url: 'http://10.0.0.2:8010'}, {name: e1, url: 'http://127.0.0.2:8010'}]"
    assert load_config(written(tmp_path, f"model: {{path: x}}\nexplorer: {{{engines}}}"), {}).explorer.port == 8010


def test_a_value_of_the_environment_is_as_one_of_the_file(tmp_path: Path):
    file = written(tmp_path, "model: {path: x}")
    with pytest.raises(ConfigError, match="FLYWHEEL_MODEL__NAME is not YAML; quote it"):
        load_config(file, {"FLYWHEEL_MODEL__NAME": "2024-13-45"})


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("FLYWHEEL_EXPLORER__PORT", "", "explorer.port=None: input should be a valid integer"),
        ("FLYWHEEL_EXPLORER", "{prot: 1}", "explorer.prot=1: no such key; did you mean 'port'?"),
        ("FLYWHEEL_TRAINER__ALGORITHMS", "{}", "trainer.algorithms={} names no algorithm"),
    ],
)
def test_a_wrong_value_of_the_environment_is_not_looked_for_in_the_file(variable, value, said, tmp_path: Path):
    file = written(tmp_path, "model: {path: x}\nexplorer: {port: 8020}")
    with pytest.raises(ConfigError, match="^" + re.escape(f"environment variable {variable}: {said}")):
        load_config(file, {variable: value})
    with pytest.raises(ConfigError, match=r"^explorer\.port=0: "):
        load_config(written(tmp_path, "model: {path: x}\nexplorer: {port: 0}"), {"FLYWHEEL_EXPLORER__HOST": "::1"})


def test_what_the_agents_side_reads_from_the_environment_is_no_setting_of_ours(tmp_path: Path):
    environ = {"FLYWHEEL_URL": "http://127.0.0.1:8010", "FLYWHEEL_KEY": "k", "FLYWHEEL_MODEL": "desk"}
    assert load_config(written(tmp_path, "model: {path: x}"), environ).model.name == "agent"


def test_a_section_in_the_environment_is_ours_under_the_name_that_the_agents_side_has_for_its_model(tmp_path: Path):
    environ = {"FLYWHEEL_MODEL": "{path: y, name: desk}"}
    assert load_config(written(tmp_path, "model: {path: x}"), environ).model.name == "desk"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("explorer: {expire_after_s: yes}", "explorer.expire_after_s"),
        ("explorer: {commit_every_s: on}", "explorer.commit_every_s"),
        ("explorer: {ledger_timeout_s: true}", "explorer.ledger_timeout_s"),
        ("reward: {down: no}", "reward.down"),
        ("reward: {clip: [false, true]}", "reward.clip.0"),
        ("reward: {metrics: {resolved: yes}}", "reward.metrics.resolved"),
        ("engine: {gpu_share: true}", "engine.gpu_share"),
        ("trainer: {learning_rate: yes}", "trainer.learning_rate"),
        ("trainer: {rehearse: on, algorithm: sft}", "trainer.rehearse"),
        ("trainer: {ppo: {gamma: on}}", "trainer.ppo.gamma"),
        ("trainer: {ppo: {dual_clip: off}}", "trainer.ppo.dual_clip"),
        ("trainer: {breaker: {outside_cut: off}}", "trainer.breaker.outside_cut"),
    ],
)
def test_yes_and_no_are_no_numbers(text, key, tmp_path: Path):
    with pytest.raises(ConfigError, match=rf"{key}=(True|False): must be a number, and YAML reads yes, no, on and off"):
        load_config(written(tmp_path, f"model: {{path: x}}\n{text}"), {})


def test_a_number_may_be_whole_or_stand_in_quotes(tmp_path: Path):
    config = load_config(written(tmp_path, "model: {path: x}\ntrainer: {learning_rate: 1e-6, lease_s: 60}"), {})
    assert (config.trainer.learning_rate, config.trainer.lease_s) == (1e-6, 60.0), "YAML takes 1e-6 for a text"


@pytest.mark.parametrize("name", ["what?x=1", "50%25", "größe #1"])
def test_the_ledger_is_in_root_dir_whatever_that_is_named(name, tmp_path: Path):
    (tmp_path / name).mkdir()
    for root_dir, url in ((name, "null"), (".", "sqlite:///ledger.sqlite3")):
        folder = tmp_path if url == "null" else tmp_path / name
        file = written(folder, f"root_dir: {root_dir!r}\ndatabase_url: {url}\nmodel: {{path: x}}")
        Ledger.open(load_config(file, {}).ledger_url).close()
        assert (tmp_path / name / "ledger.sqlite3").exists()
        (tmp_path / name / "ledger.sqlite3").unlink()
