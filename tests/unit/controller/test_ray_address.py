"""A cluster that does not answer is told at once, in a line that names what was set."""

import socket

import pytest

from valor.controller.cluster import _require_cluster
from valor.errors import UserError


@pytest.fixture
def dead() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("form", ["{}", "ray://{}", "http://{}", "nonsense", "127.0.0.1", "127.0.0.1:port"])
@pytest.mark.parametrize("variable", [True, False])
def test_nothing_answers(form, variable, dead, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    address = form.format(dead)
    if variable:
        monkeypatch.setenv("RAY_ADDRESS", address)
    key = "RAY_ADDRESS" if variable else "ray_kwargs.ray_init.address"
    with pytest.raises(UserError) as told:
        _require_cluster(None if variable else address)
    assert str(told.value).startswith(f"no Ray cluster answers at {key}={address} (")
    assert f"or {'unset it' if variable else 'leave it out'} to run on this machine alone" in str(told.value)


def test_something_answers_or_none_is_joined(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        _require_cluster(f"127.0.0.1:{server.getsockname()[1]}")
    for address in ("local", "auto", None):
        _require_cluster(address)
