"""Ray's start, when it fails."""

import os

import pytest
import ray

from valor.controller.cluster import start_ray
from valor.errors import Interrupted, TrainingStopped


@pytest.mark.parametrize(
    ("told", "kind", "words"),
    [
        (RuntimeError("The current node timed out during startup."), TrainingStopped, "did not start in time"),
        (RuntimeError("something else"), RuntimeError, "something else"),
        (SystemExit(15), Interrupted, "15"),  # by Ray's handler of SIGTERM
    ],
)
def test_what_ray_tells(told, kind, words, monkeypatch):
    environment = dict(os.environ)

    def init(**settings):
        raise told

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(kind, match=words):
        start_ray("cpu", address="local")
    assert dict(os.environ) == environment
