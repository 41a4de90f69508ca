"""`lab.py`: which PyTorch is taken, and what is said where labkit cannot be installed. Installs nothing."""

from __future__ import annotations

import ast
import importlib.util

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


def test_without_a_driver_the_build_for_cpus_is_taken_and_it_is_said_how_to_have_the_other(lab):
    torch, options, said = lab.which_torch()
    assert (torch, options) == ("cpu", ["--extra-index-url", lab.CPU_BUILDS])
    assert "no NVIDIA driver" in said
    assert "TORCH=cuda" in said


def test_with_a_driver_it_is_the_one_for_cuda(lab, monkeypatch):
    monkeypatch.setattr(lab, "has_nvidia", lambda: True)
    assert lab.which_torch()[:2] == ("cuda", [])


def test_where_the_index_cannot_be_reached_that_is_said(lab, monkeypatch):
    monkeypatch.setattr(lab, "is_reached", lambda: False)
    torch, options, said = lab.which_torch()
    assert (torch, options) == ("cuda", [])
    assert "cannot be reached" in said


@pytest.mark.parametrize("asked", ["cpu", "cuda"])
def test_the_switch_decides(lab, monkeypatch, asked):
    monkeypatch.setenv("TORCH", asked)
    torch, options, said = lab.which_torch()
    assert torch == asked
    assert bool(options) == (asked == "cpu")
    assert "as TORCH says" in said


def test_another_word_for_the_switch_is_refused(lab, monkeypatch):
    monkeypatch.setenv("TORCH", "mps")
    with pytest.raises(SystemExit, match="TORCH is cpu or cuda, got 'mps'"):
        lab.which_torch()


def test_on_macos_the_packages_index_has_builds_for_cpus_only(lab, monkeypatch):
    monkeypatch.setattr(lab.sys, "platform", "darwin")
    assert lab.which_torch()[:2] == ("cpu", [])


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
