"""Settings: precedence, validation, messages; nothing here opens a socket."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from squinchcomm.cli.env import markdown_table
from squinchcomm.config import Config, configure_logging, interface_addresses, parse_size, resolve_interface, settings
from squinchcomm.errors import ConfigError


def test_argument_beats_environment_beats_default() -> None:
    environ = {"SQUINCH_TIMEOUT": "30", "SQUINCH_CODEC": "bf16", "SQUINCH_SEED": "  "}
    config = Config.from_env(environ, timeout_s=10, seed=None)
    assert (config.timeout_s, config.codec, config.seed) == (10.0, "bf16", 0)
    assert (config.sources["timeout_s"], config.sources["codec"], config.sources["seed"]) == (
        "argument",
        "environment",
        "default",
    )


def test_defaults() -> None:
    config = Config()
    assert config == Config.from_env({})
    assert (config.transport, config.codec, config.min_compress_bytes, config.peer_timeout_s) == ("zmq", "none", 65536, 5.0)
    assert set(config.sources.values()) == {"default"}
    assert Config(codec="int8").sources["codec"] == "argument"


def test_every_setting_takes_its_default_back_and_has_one_variable() -> None:
    rows = list(settings())
    assert len({setting.env for _, _, setting in rows}) == len(rows)
    for name, default, setting in rows:
        assert setting.env.startswith("SQUINCH_")
        assert setting.doc
        if default is not None:
            assert getattr(Config(**{name: default}), name) == default
            assert getattr(Config.from_env({setting.env: str(default)}), name) == default


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("64K", 65536), ("64k", 65536), ("1.5M", 1536 << 10), ("2GiB", 2 << 30), ("7B", 7), (12, 12)]
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "-1", "1T", "1.5", "0x10", -1, True, None, 1.0])
def test_not_sizes(text: object) -> None:
    with pytest.raises(ValueError, match="not a"):
        parse_size(text)


GOOD = [
    ("port_range", "20000-20100", (20000, 20100)),
    ("port_range", (5, 5), (5, 5)),
    ("security", "CURVE", "curve"),
    ("debug", "trace", "TRACE"),
    ("link_rate", "1Gbit", "1Gbit"),
    ("chunk_bytes", "1M", 1 << 20),
    ("seed", str(2**64 - 1), 2**64 - 1),
    ("key_file", "~/job.key", Path.home() / "job.key"),
    ("interface", "127.0.0.1", "127.0.0.1"),
]


@pytest.mark.parametrize(("name", "given", "stored"), GOOD, ids=str)
def test_values_are_parsed_alike_from_both_places(name: str, given: Any, stored: Any) -> None:
    assert getattr(Config(**{name: given}), name) == stored
    if isinstance(given, str):
        env = next(setting.env for field, _, setting in settings() if field == name)
        assert getattr(Config.from_env({env: given}), name) == stored


BAD = [
    ("timeout_s", "0"),
    ("timeout_s", "inf"),
    ("timeout_s", "nan"),
    ("connect_timeout_s", "soon"),
    ("peer_timeout_s", "0.5"),
    ("security", "tls"),
    ("scheme", "udp"),
    ("port_range", "20000"),
    ("port_range", "20-10"),
    ("port_range", "0-10"),
    ("port_range", "1-70000"),
    ("io_threads", "0"),
    ("codec_threads", "-1"),
    ("codec_threads", "1.5"),
    ("seed", str(2**64)),
    ("min_compress_bytes", "lots"),
    ("link_rate", "fast"),
    ("link_rate", "1GB"),
    ("interface", "nosuch0"),
    ("host", "two words"),
    ("codec", "UPPER CASE"),
    ("debug", "LOUD"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_errors_name_the_source_and_the_value(name: str, value: Any) -> None:
    env = next(setting.env for field, _, setting in settings() if field == name)
    with pytest.raises(ConfigError, match=f"^{name}='{value}'"):
        Config(**{name: value})
    with pytest.raises(ConfigError, match=f"^{env}={value}"):
        Config.from_env({env: value})


@pytest.mark.parametrize("value", [[], {}, object(), True, 1.5])
def test_values_of_wrong_types(value: object) -> None:
    with pytest.raises(ConfigError, match="io_threads"):
        Config(io_threads=value)  # type: ignore[arg-type]


def test_unknown_argument() -> None:
    with pytest.raises(ConfigError, match="codecs: no such setting; did you mean codec\\?"):
        Config.from_env({}, codecs="bf16")


def test_unknown_variables_warn_with_the_nearest_name() -> None:
    with pytest.warns(UserWarning, match=r"SQUINCH_CODECS is set .* did you mean SQUINCH_CODEC\?"):
        Config.from_env({"SQUINCH_CODECS": "bf16"})
    with pytest.warns(UserWarning, match="squinchcomm env"):
        Config.from_env({"SQUINCH_QQQQ": "1"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config.from_env({"SQUINCH_ADDRESS": "x", "SQUINCH_JOB_TOKEN": "y", "OTHER": "z"})


def test_a_config_is_frozen_and_survives_pickling() -> None:
    config = Config.from_env({"SQUINCH_CODEC": "bf16"})
    with pytest.raises(AttributeError):
        config.codec = "none"  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(config))  # noqa: S301  our own bytes
    assert copy == config
    assert copy.sources == config.sources


def test_interfaces() -> None:
    assert "127.0.0.1" in interface_addresses()["lo"]
    assert resolve_interface("lo") == "127.0.0.1"
    assert resolve_interface("fd00::1") == "fd00::1"
    assert Config(interface="lo").bind_address == "127.0.0.1"
    assert Config().bind_address is None
    with pytest.raises(ConfigError, match=r"'nosuch0' is neither .* lo \(127\.0\.0\.1\)"):
        resolve_interface("nosuch0")


def test_codec_threads() -> None:
    cores = len(os.sched_getaffinity(0))
    assert Config().resolved_codec_threads(1) == cores
    assert Config().resolved_codec_threads(10 * cores) == 1
    assert Config(codec_threads=3).resolved_codec_threads(8) == 3


def test_logging_shows_the_rank_and_leaves_applications_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("squinchcomm")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "level", log.level)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    configure_logging("INFO", 3)
    configure_logging("INFO", 4)
    log.info("here")
    log.debug("not here")
    assert capsys.readouterr().err == "squinchcomm [rank 4] INFO here\n"
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    configure_logging("TRACE", 4)
    log.debug("to the application's handlers only")
    assert capsys.readouterr().err == ""


def test_importing_it_is_light() -> None:
    code = "import sys, squinchcomm.config, squinchcomm.launch; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert not {"torch", "numba", "zmq", "numpy"} & set(loaded)


def test_the_documented_table_is_current() -> None:
    text = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text()
    assert markdown_table() in text, "put the output of `squinchcomm env --markdown` into docs/configuration.md"
