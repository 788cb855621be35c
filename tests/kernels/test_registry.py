"""Codecs are found by name and wire id; installed ones too; nothing is found twice."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from decimal import Decimal
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

from squinchcomm.errors import ConfigError, WireFormatError
from squinchcomm.kernels import codec_by_wire_id, codec_names, get_codec, register, registry
from squinchcomm.kernels.bf16 import BFloat16
from squinchcomm.kernels.none import Raw


class Foreign(Raw):
    name = "foreign"
    wire_id = 77


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_codecs", dict(registry._codecs))
    monkeypatch.setattr(registry, "_plugins_loaded", False)


def _install(monkeypatch: pytest.MonkeyPatch, value: str) -> list[str]:
    asked: list[str] = []

    def entry_points(*, group: str) -> list[EntryPoint]:
        asked.append(group)
        return [EntryPoint("foreign", value, group)]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    return asked


def test_own_codecs() -> None:
    ids = {"none": 0, "bf16": 1, "int8": 2, "squinch6": 3, "squinch6-sr": 4}
    assert {name: get_codec(name).wire_id for name in ids} == ids
    assert all(codec_by_wire_id(wire_id) is get_codec(name) for name, wire_id in ids.items())
    assert set(ids) <= set(codec_names())


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"'zip'.*none, bf16, int8, squinch6, squinch6-sr"):
        get_codec("zip")
    with pytest.raises(WireFormatError, match="200"):
        codec_by_wire_id(200)


def test_entry_points_are_asked_for_unknown_names_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _install(monkeypatch, f"{__name__}:Foreign")
    get_codec("squinch6")
    codec_by_wire_id(3)
    assert asked == []
    assert get_codec("foreign").wire_id == 77
    assert codec_by_wire_id(77) is get_codec("foreign")
    assert asked == ["squinchcomm.codecs"]


def test_broken_plug_in_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "no_such_module:Codec")
    with pytest.raises(ConfigError, match=r"'foreign' \(no_such_module:Codec\)"):
        get_codec("foreign")


@pytest.mark.parametrize(
    ("name", "wire_id", "message"),
    [
        ("bf16", 99, "two codecs are called 'bf16'"),
        ("auto", 99, "no codec can be called 'auto'"),
        ("mine", 3, "64..255"),
        ("mine", 256, "64..255"),
        ("mine", 77, "share wire id 77"),
    ],
)
def test_clashes_are_refused(name: str, wire_id: int, message: str) -> None:
    register(Foreign())

    class Clash(BFloat16):
        pass

    clash: Any = Clash()
    clash.name, clash.wire_id = name, wire_id
    with pytest.raises(ConfigError, match=message):
        register(clash)


def test_import_needs_neither_numba_nor_a_compilation() -> None:
    script = (
        "import sys, squinchcomm.kernels as k; k.get_codec('squinch6').encoded_nbytes(5); "
        "assert not {'numba', 'llvmlite'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("name", value) for value in ("", None, 5, b"mine")]
    + [("wire_id", value) for value in (3, 256, 70.5, "70", None, True)]
    + [("wire_version", value) for value in (-1, 256, 1.0, None)]
    + [
        ("bits_per_element", value)
        for value in (0, -6.0, math.nan, math.inf, 65, True, None, "8", Decimal(8), np.array(8.0), 8j)
    ]
    + [("lossless", value) for value in (0, 1, None, "no")]
    + [("tile_size", value) for value in (0, -512, 1.5, 1 << 21, None, True)],
)
def test_attributes_that_no_codec_has_are_refused(attribute: str, value: object) -> None:
    foreign: Any = Foreign()
    setattr(foreign, attribute, value)
    with pytest.raises(ConfigError, match=re.escape(f"codec Foreign has {attribute} {value!r}; give a")):
        register(foreign)
    assert "foreign" not in codec_names()


def test_attributes_that_are_not_there_are_named() -> None:
    class Broken(Foreign):
        @property
        def tile_size(self) -> int:  # type: ignore[override]
            raise RuntimeError("no tiles today")

    with pytest.raises(ConfigError, match="codec Broken has no tile_size: RuntimeError"):
        register(Broken())


def test_plug_ins_with_such_attributes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Foreign, "tile_size", None)
    _install(monkeypatch, f"{__name__}:Foreign")
    with pytest.raises(ConfigError, match=r"'foreign' \(.*:Foreign\).*tile_size None"):
        get_codec("foreign")
