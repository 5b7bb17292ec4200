"""workflow.py: Trinity's named workflows and rewards, as functions for `flywheel learn`."""

from __future__ import annotations

import re
from typing import Any

from services.trinity.key import Given, NoCounterpart, NotNeeded, Settings, Take
from services.trinity.takes import is_on

FILE = "workflow.py"
REWARD, PROMPT = f"{FILE}:reward", f"{FILE}:PROMPT"  # further items in it
_SETS = "buffer.explorer_input."
_TASK_SET = re.compile(r"buffer\.explorer_input\.(taskset|tasksets\.\d+)\.")
_BOXED = "math_boxed_workflow"
_CHATS = ("simple_workflow", "math_workflow", _BOXED)
EXAMPLES = {
    "agentscope_react_workflow": "math",
    "agentscope_react_math_workflow": "math",
    "as_react_workflow": "math",
    "alfworld_workflow": "alfworld",
    "step_wise_alfworld_workflow": "alfworld",
    "email_search_workflow": "email_search",
    "frozen_lake_workflow": "frozen_lake",
    "webshop_workflow": "webshop",
}
_BOUND = ("webshop", "email_search")  # examples whose agents set max_tokens in each chat
_REWARDS = {  # ours for Trinity's, and how ours differs
    "math_reward": ("number", "the last number counts; Trinity's form with <think> and <answer> earns nothing"),
    "math_boxed_reward": ("boxed", "a formula counts word for word"),
    "accuracy_reward": ("boxed", "a formula counts word for word, and outside of a box nothing does"),
}
_REWARD_OF = {"math_workflow": "math_reward", _BOXED: "math_boxed_reward"}
_OWN_REWARD_OF_EXAMPLE = "the example has a reward of its own"
_OWN_TASKS = "the example has tasks of its own, and learns for --minutes; docs/examples.md lists its options"
BIND = "bind it to your workflow, as functools.partial does"
ARGUMENTS = f"a complete workflow.py and the examples do not read it; {BIND}"
_NO_TASKS = "there is no task set"
_OWN_SETTINGS = "the example has settings of its own; docs/examples.md lists its options"
_OWN_PROMPT = "Trinity's {name} has a system prompt of its own: write the one that you want"

_HEAD = '''"""What Trinity's {name} does with a row, by flywheel convert-config."""

import flywheel{rewards}
'''
_CHAT = '''
PROMPT = {prompt!r}{remark}


async def workflow(task, model: flywheel.Model):
    """One chat for each row of the file of tasks. Returns its reward."""
    messages = [{{"role": "user", "content": task[{question!r}]}}]
    if PROMPT:
        messages.insert(0, {{"role": "system", "content": PROMPT}})
    async with model.async_openai() as client:
        reply = await client.chat.completions.create(model=model.name, messages=messages)
    return reward(reply.choices[0].message.content or "", task[{answer!r}])
'''
_REWARD = '''

def reward(said: str, truth: str) -> float:
    """Trinity's {name}: {otherwise}."""
    return rewards.{ours}(said, truth)
'''
_OWN_REWARD = '''

def reward(said: str, truth: str) -> float:
    """What an answer earned."""
    raise NotImplementedError("write here what {name} does; flywheel.rewards has the usual functions")
'''
_OWN = '''

async def workflow(task, model: flywheel.Model):
    """All that an agent does for a row of the file of tasks. Returns its reward."""
    raise NotImplementedError("write here what {name} does; docs/agents.md says how")
'''


def workflow(value: Any, given: Given) -> Settings:
    """Return our example for an environment of Trinity, or else the file, complete for Trinity's single chats."""
    _require_same(value, given, "default_workflow_type")
    name = _plain(value)
    return {f"examples.{EXAMPLES[name]}": value} if name in EXAMPLES else {FILE: value}


def reward(value: Any, given: Given) -> Settings:
    """Return the reward of a workflow that has none of its own."""
    if example(given):
        raise NotNeeded(_OWN_REWARD_OF_EXAMPLE)
    _require_same(value, given, "default_reward_fn_type")
    return {REWARD: value}


def _require_same(value: Any, given: Given, name: str) -> None:
    """Raise unless the first task set has this value, too: learn runs one workflow and one reward for all tasks."""
    counts = _of_set(given, name)
    if value == counts:
        return
    places = {found.group() for key in given if (found := _TASK_SET.match(key))}
    if value in [given.first(f"{place}{name}", f"{_SETS}{name}") for place in places]:
        raise NoCounterpart(f"{counts} counts for all tasks; learn the others by themselves", changes_training=True)
    raise NotNeeded("the task sets have their own")


def same(known: str) -> Take:
    """Return a take for a key of held-out tasks: learn uses the same workflow and reward for them."""

    def take(value: Any, given: Given) -> Settings:
        if value == _of_set(given, known):
            raise NotNeeded("held-out tasks have the same")
        raise NoCounterpart("evaluate held-out tasks by `flywheel.evaluate` with a function of their own")

    return take


def prompt(value: Any, given: Given) -> Settings:
    """Return the system prompt of a single chat."""
    if _plain(_of_set(given, "default_workflow_type")) not in _CHATS:
        raise NoCounterpart("write it into your workflow's messages")
    return {PROMPT: value}


def argument(value: Any, given: Given) -> Settings:
    """Report an argument of Trinity's workflow, as a change of training unless the workflow is yet to be written."""
    name = _plain(_of_set(given, "default_workflow_type"))
    if name not in (*_CHATS, *EXAMPLES):
        raise _left_to_bind(value, given)
    _require_effect(value, given)
    if name in EXAMPLES:
        raise NoCounterpart(_OWN_SETTINGS, changes_training=_learns(given))
    if name != _BOXED:
        raise NotNeeded(f"Trinity's {name} does not read it")
    raise _unwritten(name, given)


def coefficient(value: Any, given: Given) -> Settings:
    """Report the cost of a reply without a thought, which math_boxed_workflow counts if it requests thoughts."""
    name, thinks = _plain(_of_set(given, "default_workflow_type")), _of_set(given, "workflow_args.with_think")
    if name == _BOXED and not is_on(thinks):
        raise NotNeeded("with with_think")
    return argument(value, given)


def argument_of_reward(value: Any, given: Given) -> Settings:
    """Report an argument of Trinity's reward, as a change of training if workflow.py contains that reward."""
    if example(given):
        raise NotNeeded(_OWN_REWARD_OF_EXAMPLE)
    name = _reward_of(given)
    if _plain(_of_set(given, "default_workflow_type")) not in _CHATS or name not in _REWARDS:
        raise _left_to_bind(value, given)
    _require_effect(value, given)
    if name == "math_boxed_reward":
        raise NotNeeded(f"Trinity's {name} does not read it")
    raise _unwritten(name, given)


def _left_to_bind(value: Any, given: Given) -> NotNeeded | NoCounterpart:
    """Return the result for an argument of a workflow or reward that is yet to be written."""
    if not given.has_tasks:
        return NotNeeded(_NO_TASKS)
    return NotNeeded("empty") if value in ("", {}, []) else NoCounterpart(BIND)


def _require_effect(value: Any, given: Given) -> None:
    """Raise NotNeeded for an argument that is off or empty, and if there are no tasks to learn from."""
    if not given.has_tasks:
        raise NotNeeded(_NO_TASKS)
    if value in ("", {}, []) or str(value).lower() == "false":
        raise NotNeeded("as it is here")


def _unwritten(name: str, given: Given) -> NoCounterpart:
    what_to_do = f"write into {FILE} what Trinity's {name} does with it"
    return NoCounterpart(what_to_do, changes_training=_learns(given))


def _learns(given: Given) -> bool:
    return given.get("mode") != "bench"


def _reward_of(given: Given) -> str:
    """Return Trinity's reward for a single chat."""
    workflow_of_set = _plain(_of_set(given, "default_workflow_type"))
    return str(_of_set(given, "default_reward_fn_type") or _REWARD_OF.get(workflow_of_set, ""))


def example(given: Given) -> str | None:
    """Return the folder of the example that corresponds to Trinity's workflow."""
    return EXAMPLES.get(_plain(_of_set(given, "default_workflow_type")))


def require_no_own(path: str, given: Given) -> None:
    """Raise NoCounterpart for a setting that an example does not read."""
    if example(given) is None:
        return
    if path in ("tasks", "learn.epochs"):
        raise NoCounterpart(_OWN_TASKS, changes_training=True)
    if path == "learn.params.max_tokens" and example(given) in _BOUND:
        raise NoCounterpart("the example's agent asks for at most 256 tokens an answer", changes_training=True)
    if path.startswith(("eval_tasks", "learn.eval_")):
        raise NoCounterpart("the example evaluates held-out tasks of its own, before and after it learns")


def text(given: Given) -> str:
    """Return the contents of the file."""
    known = _of_set(given, "default_workflow_type")
    name, shown = _plain(known), _shown(known, "your workflow")
    if name not in _CHATS:
        return _HEAD.format(name=shown, rewards="") + _OWN.format(name=shown)
    prompt, trinity = _of_set(given, "format.system_prompt"), _reward_of(given)
    adds_prompt = prompt is None and name != "simple_workflow"
    chat = _CHAT.format(
        prompt=str(prompt or ""),
        remark=f"  # {_OWN_PROMPT.format(name=name)}" if adds_prompt else "",
        question=str(_of_set(given, "format.prompt_key") or "prompt"),
        answer=str(_of_set(given, "format.response_key") or "response"),
    )
    if trinity not in _REWARDS:
        written = _OWN_REWARD.format(name=_shown(trinity, "your reward function"))
        return _HEAD.format(name=shown, rewards="") + chat + written
    ours, otherwise = _REWARDS[trinity]
    head = _HEAD.format(name=shown, rewards="\nfrom flywheel import rewards")
    return head + chat + _REWARD.format(name=trinity, ours=ours, otherwise=otherwise)


def _shown(name: Any, unnamed: str) -> str:
    """Return a name that may appear in a program's text."""
    return str(name) if re.fullmatch(r"[\w.:-]+", str(name or "")) else unnamed


def _of_set(given: Given, name: str) -> Any:
    """Return a key of the first task set, of all task sets, or of the old layout."""
    return given.first(*(f"{place}{name}" for place in (f"{_SETS}taskset.", f"{_SETS}tasksets.0.", _SETS, "data.")))


def _plain(value: Any) -> str:
    """Return the name of a workflow without the prefix for Trinity's execution mode."""
    return str(value or "").removeprefix("async_")
