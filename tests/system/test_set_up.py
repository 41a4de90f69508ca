"""`lab.py`: which PyTorch is taken, and what is said where labkit cannot be installed. Installs nothing."""

from __future__ import annotations

import ast
import importlib.util
import re

import pytest

from tests.support.repository import ROOT


@pytest.fixture
def lab(monkeypatch):
    spec = importlib.util.spec_from_file_location("lab", ROOT / "lab.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("TORCH", raising=False)
    monkeypatch.delenv("PIP_NO_INDEX", raising=False)
    monkeypatch.setattr(module.sys, "platform", "linux")
    monkeypatch.setattr(module, "has_nvidia", lambda: False)
    monkeypatch.setattr(module, "is_reached", lambda: True)
    return module


@pytest.mark.parametrize(
    ("asked", "platform", "has_nvidia", "is_reached", "torch", "said"),
    [
        ("", "linux", False, True, "cpu", "no NVIDIA driver.*TORCH=cuda"),
        ("", "linux", True, True, "cuda", ""),
        ("", "linux", False, False, "cuda", "cannot be reached"),
        ("", "darwin", False, True, "cpu", ""),
        ("cpu", "linux", True, True, "cpu", "as TORCH says"),
        ("cuda", "linux", False, True, "cuda", "as TORCH says"),
    ],
)
def test_which_pytorch_is_taken_and_what_is_said(
    lab, monkeypatch, asked, platform, has_nvidia, is_reached, torch, said
):
    if asked:
        monkeypatch.setenv("TORCH", asked)
    monkeypatch.setattr(lab.sys, "platform", platform)
    monkeypatch.setattr(lab, "has_nvidia", lambda: has_nvidia)
    monkeypatch.setattr(lab, "is_reached", lambda: is_reached)
    found, options, remark = lab.which_torch()
    assert found == torch
    assert options == (["--extra-index-url", lab.CPU_BUILDS] if platform == "linux" and torch == "cpu" else [])
    assert re.search(said, remark)


def test_another_word_for_the_switch_is_refused(lab, monkeypatch):
    monkeypatch.setenv("TORCH", "mps")
    with pytest.raises(SystemExit, match="TORCH is cpu or cuda, got 'mps'"):
        lab.which_torch()


def test_an_old_python_is_named_with_what_to_type(lab, monkeypatch):
    monkeypatch.setattr(lab.sys, "version_info", (3, 9, 6))
    monkeypatch.setattr(lab.platform, "python_version", lambda: "3.9.6")
    assert lab.unsupported().startswith("labkit needs Python 3.11 or newer, this is 3.9.6; try make PYTHON=")


def test_systems_for_which_there_is_no_pytorch_are_named(lab, monkeypatch):
    assert lab.unsupported() == ""
    monkeypatch.setattr(lab.sysconfig, "get_config_var", lambda _: "x86_64-pc-linux-musl")
    assert "musl" in lab.unsupported()
    monkeypatch.setattr(lab.sysconfig, "get_config_var", lambda _: "")
    monkeypatch.setattr(lab.sys, "platform", "darwin")
    monkeypatch.setattr(lab.platform, "machine", lambda: "x86_64")
    assert "Intel" in lab.unsupported()
    monkeypatch.setattr(lab.sys, "platform", "win32")
    assert "WSL2" in lab.unsupported()


def test_the_oldest_python_that_people_have_reads_it_as_far_as_that():
    """macOS brings 3.9."""
    ast.parse((ROOT / "lab.py").read_text(encoding="utf-8"), feature_version=(3, 9))
