"""Trinity-RFT's workflows and rewards are taken over by their names: workflow.py, or one of our examples."""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
from flywheel import Model

from examples.run import SERVED, learn_options, parser
from services import cli
from services.trinity import workflow
from services.trinity.convert import Line
from services.trinity.key import Fate
from tests.support.trinity_files import KINDS, as_yaml, converted

EXAMPLES = Path(__file__).parents[2] / "examples"
SETS = "buffer.explorer_input."
WORKFLOW, HELD_OUT = f"{SETS}default_workflow_type", f"{SETS}default_eval_workflow_type"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def convert(**keys: str) -> int:
    """The exit status of the command over a task set with these keys."""
    Path("trinity.yaml").write_text(as_yaml({**KINDS["grpo"], **keys}), encoding="utf-8")
    return cli.main(["convert-config", "trinity.yaml"])


def written(**keys: str) -> ModuleType:
    """workflow.py as it is written for these keys, imported."""
    assert convert(**keys) == 0
    module = ModuleType("workflow")
    exec(compile(Path("workflow.py").read_text(encoding="utf-8"), "workflow.py", "exec"), module.__dict__)
    return module


def line_of(key: str, **keys: str) -> Line:
    lines = converted(as_yaml({**KINDS["grpo"], **keys})).lines
    return next(line for line in lines if line.key == key)


@pytest.mark.parametrize("name", ["math_boxed_workflow", "async_math_boxed_workflow"])
def test_a_single_chat_runs_as_it_is_written(name, scripted_engine):
    module = written(**{WORKFLOW: name, f"{SETS}taskset.format.system_prompt": 'Put "it" into a box.'})
    assert (module.reward(r"\boxed{7}", "7"), module.reward("7", "7")) == (1.0, 0.0)
    task = {"question": "1 + 6?", "answer": "7"}
    model = Model.of(f"{scripted_engine.url}/v1", "agent", key="none")
    scripted_engine.script.message = {"content": r"It is \boxed{7}."}
    assert asyncio.run(module.workflow(task, model)) == 1.0
    (body,) = scripted_engine.script.bodies
    assert body["messages"] == [
        {"role": "system", "content": 'Put "it" into a box.'},
        {"role": "user", "content": "1 + 6?"},
    ]


def test_a_prompt_that_trinity_adds_by_itself_is_reported():
    module = written(**{WORKFLOW: "math_workflow"})
    assert module.PROMPT == "" and module.reward("so it is 42.", "42") == 1.0
    assert "Trinity's math_workflow has a system prompt of its own" in Path("workflow.py").read_text(encoding="utf-8")


def test_a_reward_that_only_its_author_knows_is_left_to_be_written():
    module = written(**{WORKFLOW: "simple_workflow", f"{SETS}default_reward_fn_type": "countdown_reward"})
    with pytest.raises(NotImplementedError, match="countdown_reward"):
        module.reward("a", "b")


def test_a_workflow_that_only_its_author_knows_is_left_to_be_written(capsys):
    module = written(**{WORKFLOW: "our_own_workflow"})
    with pytest.raises(NotImplementedError, match="our_own_workflow"):
        asyncio.run(module.workflow({}, None))
    command = "python -m flywheel learn workflow:workflow tasks.jsonl --config learn.yaml --url http://127.0.0.1:8010"
    assert command in capsys.readouterr().out.splitlines()


def test_a_name_is_no_way_into_the_program_s_text():
    module = written(**{WORKFLOW: 'x"); raise SystemExit("', f"{SETS}default_reward_fn_type": '"""'})
    with pytest.raises(NotImplementedError, match="your workflow"):
        asyncio.run(module.workflow({}, None))


def test_an_environment_of_trinity_s_is_one_of_our_examples(capsys):
    assert convert(**{WORKFLOW: "frozen_lake_workflow"}) == 1, "it has tasks of its own"
    said = capsys.readouterr().out
    assert re.search(rf"^  {re.escape(WORKFLOW)} +-> examples.frozen_lake", said, re.MULTILINE)
    assert "flywheel demo frozen_lake --url http://127.0.0.1:8010 --config learn.yaml" in said.splitlines()
    assert Path("learn.yaml").exists() and not Path("workflow.py").exists()
    reward = f"{SETS}default_reward_fn_type"
    assert line_of(reward, **{WORKFLOW: "frozen_lake_workflow", reward: "math_reward"}).fate is Fate.NOT_NEEDED
    assert {path.name for path in EXAMPLES.iterdir()} >= set(workflow.EXAMPLES.values())


def test_the_command_of_an_example_learns_with_the_keys_that_are_reported_as_taken_over(capsys):
    lines = converted(as_yaml({**KINDS["grpo_eval"], WORKFLOW: "frozen_lake_workflow"})).lines
    taken = [line.ours.split(".")[1] for line in lines if line.ours.startswith("learn.")]
    Path("conf").mkdir()
    assert cli.main(["convert-config", "trinity.yaml", "-o", "conf/flywheel.yaml"]) == 1
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    args = parser("frozen_lake", "").parse_args(words[words.index("frozen_lake") + 1 :])
    options = learn_options({**SERVED, "seed": 3}, args.config)
    assert set(taken) <= set(options) and {"runs_per_task", "params", "at_once"} <= set(taken)
    assert (options["runs_per_task"], options["at_once"], options["seed"]) == (8, 16, 3)
    assert options["params"] == {"max_tokens": 1024, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
                                 "repetition_penalty": 1.0}  # fmt: skip


def test_without_a_number_of_runs_an_example_makes_trinity_s_one():
    keys = {**KINDS["ppo"], WORKFLOW: "frozen_lake_workflow", "algorithm.repeat_times": None}
    assert (converted(as_yaml(keys)).learn() or {})["runs_per_task"] == 1


@pytest.mark.parametrize(("workflow", "is_lost"), [("webshop", True), ("email_search", True), ("frozen_lake", False)])
def test_the_length_of_answers_is_reported_where_the_example_s_agent_sets_its_own(workflow, is_lost):
    keys = {WORKFLOW: f"{workflow}_workflow", f"{SETS}taskset.rollout_args.max_tokens": 99}
    line = line_of(f"{SETS}taskset.rollout_args.max_tokens", **keys)
    assert (line.fate is Fate.NO_COUNTERPART) is line.changes_training is is_lost


@pytest.mark.parametrize("path", ["tasks.jsonl", "tasks.parquet"])
def test_keys_that_an_example_does_not_read_have_no_counterpart(path):
    keys = {WORKFLOW: "frozen_lake_workflow", f"{SETS}taskset.path": path}
    done = converted(as_yaml({**KINDS["grpo_eval"], **keys}))
    ours = {line.key: line for line in done.lines}
    for key in (f"{SETS}taskset.path", "buffer.total_epochs"):
        assert ours[key].fate is Fate.NO_COUNTERPART and ours[key].changes_training
        assert "tasks of its own" in ours[key].remark
    for key in ("path", "repeat_times", "rollout_args.top_p"):
        line = ours[f"{SETS}eval_tasksets.0.{key}"]
        assert line.fate is Fate.NO_COUNTERPART and "before and after" in line.remark
    assert not {"tasks", "epochs", "eval_runs", "eval_params", "eval_every_versions"} & set(done.learn() or {})


@pytest.mark.parametrize(
    ("held_out", "fate"), [("math_workflow", Fate.NOT_NEEDED), ("math_eval_workflow", Fate.NO_COUNTERPART)]
)
def test_held_out_tasks_have_the_same_workflow_or_are_reported(held_out, fate):
    assert line_of(HELD_OUT, **{WORKFLOW: "math_workflow", HELD_OUT: held_out}).fate is fate


def test_a_system_prompt_of_a_workflow_that_is_not_a_single_chat_is_reported():
    prompt = f"{SETS}taskset.format.system_prompt"
    assert line_of(prompt, **{WORKFLOW: "our_own_workflow", prompt: "Win."}).fate is Fate.NO_COUNTERPART


def test_a_workflow_that_exists_is_not_written_over(capsys):
    Path("workflow.py").write_text("mine")
    assert convert() == 2
    assert "workflow.py exists" in capsys.readouterr().err
    assert Path("workflow.py").read_text() == "mine" and not Path("flywheel.yaml").exists()


def test_from_another_folder_the_command_has_the_path_of_the_workflow(capsys):
    Path("conf").mkdir()
    Path("trinity.yaml").write_text(as_yaml(KINDS["grpo"]), encoding="utf-8")
    assert cli.main(["convert-config", "trinity.yaml", "-o", "conf/flywheel.yaml"]) == 0
    assert "PYTHONPATH=conf python -m flywheel learn workflow:workflow" in capsys.readouterr().out


ARGUMENTS = f"{SETS}taskset.workflow_args."
THINKING = {f"{ARGUMENTS}with_think": True, f"{ARGUMENTS}format_score_coef": 0.1, f"{ARGUMENTS}use_base": False}


def lost(**keys: object) -> list[str]:
    return [line.key for line in converted(as_yaml({**KINDS["grpo"], **keys})).lost]


def test_arguments_that_a_complete_workflow_does_not_have_are_marked():
    assert lost(**{WORKFLOW: "math_boxed_workflow", **THINKING}) == [
        f"{ARGUMENTS}format_score_coef",
        f"{ARGUMENTS}with_think",
    ]
    line = line_of(f"{ARGUMENTS}with_think", **{WORKFLOW: "math_boxed_workflow", **THINKING})
    assert line.remark == "write into workflow.py what Trinity's math_boxed_workflow does with it"
    assert lost(**{WORKFLOW: "math_boxed_workflow", f"{ARGUMENTS}use_base": True}) == [f"{ARGUMENTS}use_base"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("math_boxed_workflow", {"use_base": False, "with_think": False, "format_score_coef": 0.2}),
        ("math_boxed_workflow", {"use_base": "false"}),
        ("math_workflow", {"with_think": True}),
        ("simple_workflow", {"with_think": True}),
    ],
)
def test_arguments_with_which_trinity_does_nothing_special_are_not_needed(name, arguments):
    keys = {WORKFLOW: name, **{ARGUMENTS + key: value for key, value in arguments.items()}}
    for key in arguments:
        assert line_of(ARGUMENTS + key, **keys).fate is Fate.NOT_NEEDED


def test_arguments_of_an_environment_are_marked_because_the_example_has_settings_of_its_own():
    keys = {WORKFLOW: "frozen_lake_workflow", f"{ARGUMENTS}env_max_steps": 8, f"{ARGUMENTS}is_slippery": False}
    line = line_of(f"{ARGUMENTS}env_max_steps", **keys)
    assert line.changes_training and "the example has settings of its own" in line.remark
    assert line_of(f"{ARGUMENTS}is_slippery", **keys).fate is Fate.NOT_NEEDED


def test_arguments_of_a_workflow_that_is_left_to_be_written_are_not_marked():
    keys = {WORKFLOW: "our_own_workflow", f"{ARGUMENTS}with_think": True}
    line = line_of(f"{ARGUMENTS}with_think", **keys)
    assert line.fate is Fate.NO_COUNTERPART and "functools.partial" in line.remark and not line.changes_training


def test_arguments_of_tasks_that_nothing_is_learned_from_are_not_marked():
    keys = {WORKFLOW: "math_boxed_workflow", f"{SETS}taskset.workflow_args.with_think": True}
    held_out = f"{SETS}eval_tasksets"
    assert not lost(**{WORKFLOW: "math_boxed_workflow", held_out: [{"workflow_args": {"with_think": True}}]})
    for mode in ("bench", "train"):
        assert f"{ARGUMENTS}with_think" not in lost(mode=mode, **keys)


@pytest.mark.parametrize(
    ("workflow", "reward", "is_marked"),
    [
        ("math_workflow", None, True),
        ("simple_workflow", "accuracy_reward", True),
        ("math_boxed_workflow", None, False),
        ("simple_workflow", "countdown_reward", False),
        ("frozen_lake_workflow", "math_reward", False),
        ("our_own_workflow", "math_reward", False),
    ],
)
def test_arguments_of_a_reward_are_marked_where_the_written_one_does_not_have_them(workflow, reward, is_marked):
    argument = f"{SETS}taskset.reward_fn_args.pattern"
    keys = {WORKFLOW: workflow, f"{SETS}default_reward_fn_type": reward, argument: ".*"}
    assert line_of(argument, **keys).changes_training is is_marked
