"""Ray's start, when it fails."""

import os

import pytest
import ray

from valor.controller.cluster import start_ray
from valor.errors import TrainingStopped


@pytest.mark.parametrize(
    ("told", "kind", "words"),
    [
        ("The current node timed out during startup.", TrainingStopped, "did not start in time"),
        ("something else", RuntimeError, "something else"),
    ],
)
def test_what_ray_tells(told, kind, words, monkeypatch):
    environment = dict(os.environ)

    def init(**settings):
        raise RuntimeError(told)

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(kind, match=words):
        start_ray("cpu", address="local")
    assert dict(os.environ) == environment
