"""`flywheel convert-config`: converts Trinity-RFT's configuration to ours, and reports the result for each key."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import ConfigError

if TYPE_CHECKING:
    from services.trinity.convert import Conversion

WORKFLOW = "workflow.py"
HELP = "write flywheel.yaml from a configuration of Trinity-RFT"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "files", metavar="TRINITY.yaml", nargs="+", type=Path, help="one file, or the explorer's and the trainer's"
    )
    parser.add_argument(
        "-o",
        "--out",
        metavar="FILE",
        type=Path,
        default=Path("flywheel.yaml"),
        help="the file to write (default: flywheel.yaml)",
    )
    parser.add_argument("--lenient", action="store_true", help="exit with status 0 even if training would change")


def run(args: Namespace) -> int:
    """Convert and report. Returns 1 if something that changes training was lost. Raises ConfigError."""
    if len(args.files) > 2:
        raise ConfigError(f"{len(args.files)} files are given; name one, or an explorer's and a trainer's")
    from services.trinity.convert import convert
    from services.trinity.read import read

    given, remarks = read(args.files, os.environ)
    done = convert(given)
    done.remarks[:0] = remarks
    _require_absent(args.out)  # also because a folder's name cannot be replaced
    texts = _agents_side(done, args.out)
    if args.out in texts:
        raise ConfigError(f"{args.out.name} is a file of the agent's side, which is also written; name another with -o")
    _require_absent(*texts)
    try:
        _write(args, done.flywheel())
        for file, text in texts.items():
            file.write_text(text, encoding="utf-8")
    except (OSError, KeyboardInterrupt):
        for file in (args.out, *texts):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        raise
    _show(done, args.out, list(texts))
    return 1 if done.lost and not args.lenient else 0


def _require_absent(*files: Path) -> None:
    for file in files:
        if file.exists():
            raise ConfigError(f"{file} exists; name another file with -o, in another folder")


def _agents_side(done: Conversion, out: Path) -> dict[Path, str]:
    """Return learn.yaml, and workflow.py unless an example has the workflow; nothing without a task set."""
    learn = done.learn()
    if learn is None:
        return {}
    file = out.with_name("learn.yaml")
    texts = {file: json.dumps(learn, indent=2) + "\n"}  # JSON is YAML, and the SDK reads it without a YAML parser
    if done.example is None:
        texts[out.with_name(WORKFLOW)] = done.workflow()
    return texts


def _write(args: Namespace, tree: dict[str, Any]) -> None:
    """Write flywheel.yaml after our own loader has read it. Paths relative to here become relative to the file."""
    import yaml

    from services.trinity.takes import is_hub_name
    from shared.config import load_config

    if "path" not in tree.get("model", {}):
        raise ConfigError("model.model_path is missing; add it to Trinity's file")
    folder = args.out.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"the folder of {args.out} does not exist; make it, or name another with -o")
    model = str(tree["model"]["path"])
    if not is_hub_name(model) or Path(model).exists():
        tree["model"]["path"] = _seen_from(folder, model)
    if "root_dir" in tree:
        tree["root_dir"] = _seen_from(folder, str(tree["root_dir"]))
    names = " and ".join(file.name for file in args.files)
    text = f"# From {names} by flywheel convert-config\n" + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".yaml", encoding="utf-8") as trial:
        trial.write(text)
        trial.flush()
        try:
            load_config(trial.name, environ={})
        except ConfigError as error:
            raise ConfigError(f"{names} cannot be taken over: {error}") from error
    args.out.write_text(text, encoding="utf-8")


def _seen_from(folder: Path, path: str) -> str:
    """Convert a path relative to here to one relative to a folder."""
    try:
        given = Path(path).expanduser()
    except RuntimeError as exc:
        raise ConfigError(f"{path}: the user has no home folder here; write the whole path") from exc
    return path if given.is_absolute() or folder == Path.cwd() else os.path.relpath(given, folder)


def _show(done: Conversion, out: Path, agents_side: list[Path]) -> None:
    from rich.console import Console

    from services.trinity.convert import counts

    console = Console(highlight=False, markup=False, soft_wrap=True)
    widest = max(len(line.key) for line in done.lines)
    for fate, lines in counts(done.lines):
        console.print(f"{fate}: {len(lines)}")
        for line in lines:
            mark = "!" if line.changes_training else " "
            arrow = f"-> {line.ours}" + (f"  ({line.remark})" if line.remark else "") if line.ours else line.remark
            console.print(f"{mark} {line.key:<{widest}}  {arrow}")
    for remark in done.remarks:
        console.print(remark)
    console.print(f"{len(done.lines)} keys; {len(done.lost)} of them, marked !, change what is trained")
    for file in (out, *agents_side):
        console.print(f"written: {file}")
    if agents_side:
        console.print("the agent's side, when `flywheel up` runs:")
        console.print(_learn_command(done, agents_side[0]))


def _learn_command(done: Conversion, learn_file: Path) -> str:
    host = str(done.settings.get("explorer.host", "127.0.0.1"))
    url = f"http://{f'[{host}]' if ':' in host else host}:{done.settings.get('explorer.port', 8010)}"
    if done.example is not None:
        return f"flywheel demo {done.example} --url {url} --config {shlex.quote(str(learn_file))}"
    tasks, held_out = done.settings.get("tasks", "TASKS.jsonl"), done.settings.get("eval_tasks")
    folder = learn_file.parent
    path = "" if folder.resolve() == Path.cwd() else f"PYTHONPATH={shlex.quote(str(folder))} "
    words = [f"{WORKFLOW.removesuffix('.py')}:workflow", str(tasks)]
    words += ["--eval", str(held_out)] if held_out else []
    return f"{path}python -m flywheel learn {shlex.join([*words, '--config', str(learn_file)])} --url {url}"
