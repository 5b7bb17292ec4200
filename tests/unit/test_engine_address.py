"""Where an engine listens, and the token that it asks for."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.engine.cpu import one_process
from services.engine.launch import listen_host, run_engine
from shared.config import Config
from shared.engine_token import engine_token
from shared.errors import ConfigError, StartupError


def engine_config(url: str, **engine: str) -> Config:
    explorer = {"engines": [{"name": "e0", "url": url}]}
    return Config.model_validate({"model": {"path": "base"}, "explorer": explorer, "engine": engine})


@pytest.mark.parametrize(
    ("url", "engine", "host"),
    [
        ("http://127.0.0.1:8101", {}, "127.0.0.1"),
        ("http://localhost:8101", {}, "localhost"),
        ("http://192.0.2.7:8101", {}, "192.0.2.7"),
        ("http://gpu-1.example:8101", {"host": "0.0.0.0"}, "0.0.0.0"),
    ],
)
def test_an_engine_listens_on_the_address_that_its_url_names(url, engine, host):
    config = engine_config(url, **engine)
    assert listen_host(config, config.explorer.engines[0]) == host


@pytest.mark.parametrize(
    ("url", "port"),
    [("http://gpu-1.example", 80), ("https://gpu-1.example", 443), ("https://gpu-1.example:8101", 8101)],
)
def test_an_engines_port_is_that_of_its_url_or_of_the_urls_scheme(url, port):
    assert engine_config(url).explorer.engines[0].port == port


@pytest.mark.parametrize("url", ["http://gpu-1.example:0", "http://gpu-1.example?x=1", "http://gpu-1.example:8101#e0"])
def test_a_url_with_more_than_an_address_or_with_less_is_refused(url):
    with pytest.raises(ValueError, match="url"):
        engine_config(url)


@pytest.mark.parametrize(("answer", "said"), [(None, "no address here"), ("127.0.1.1", "no other machine reaches it")])
def test_an_engine_with_an_unresolvable_name_gets_an_error_with_the_setting_to_change(answer, said, monkeypatch):
    def resolve(host: str, port: int, **_: object) -> list[tuple]:
        if answer is None:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answer, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    config = engine_config("http://gpu-1.example:8101")
    with pytest.raises(StartupError, match=r"engine\.host") as error:
        listen_host(config, config.explorer.engines[0])
    assert said in str(error.value)


def test_of_several_engines_one_is_named(monkeypatch):
    engines = [{"name": f"e{n}", "url": f"http://127.0.0.1:810{n}"} for n in range(2)]
    config = Config.model_validate({"model": {"path": "base"}, "explorer": {"engines": engines}})
    with pytest.raises(ConfigError, match=r"^--name is missing; choose one of: e0, e1$"):
        run_engine(config, None)
    with pytest.raises(ConfigError, match=r"^--name 'e2' is none of explorer\.engines; choose one of: e0, e1$"):
        run_engine(config, "e2")


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("http://127.0.0.1:8101", "http://127.0.0.1:8101"),
        ("http://localhost:8101", "http://127.0.0.1:8101"),
        ("http://[::1]:8101", "http://127.0.0.1:8101"),
        ("http://GPU-1.example", "http://gpu-1.example:80"),
        ("https://[2001:db8::7]", "https://[2001:db8::7]:443"),
    ],
)
def test_an_engine_has_one_plain_url_however_its_address_is_written(url, plain):
    assert engine_config(url).explorer.engines[0].plain_url == plain


def test_one_engine_is_not_configured_twice_under_two_names_of_this_machine():
    engines = [{"name": f"e{n}", "url": f"http://{host}:8101"} for n, host in enumerate(("127.0.0.1", "localhost"))]
    with pytest.raises(ValueError, match=r"explorer\.engines, url: 'http://127\.0\.0\.1:8101' appears twice"):
        Config.model_validate({"model": {"path": "base"}, "explorer": {"engines": engines}})


def test_the_engines_token_is_made_once_for_its_user_alone_and_a_setting_takes_its_place(tmp_path):
    config = engine_config("http://127.0.0.1:8101").model_copy(update={"root_dir": str(tmp_path / "data")})
    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(engine_token, [config] * 8))
    assert len(tokens) == 1 and len(tokens.pop()) == 48
    (file,) = (tmp_path / "data").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    given = engine_config("http://127.0.0.1:8101", admin_token="t" * 16)
    assert engine_token(given) == "t" * 16
    (tmp_path / "data" / "engine.token").write_text("")
    with pytest.raises(StartupError, match="is empty"):
        engine_token(config)


def test_on_two_cores_the_engine_core_runs_the_model_unless_configured_otherwise():
    apart, threads = "VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS"
    assert one_process(2, {}) == {apart: "0", threads: "1"}
    assert one_process(1, {apart: "1", threads: "2"}) == {}
    assert one_process(2, {"VLLM_CPU_OMP_THREADS_BIND": "0"}) == {}
    assert one_process(3, {}) == {}
