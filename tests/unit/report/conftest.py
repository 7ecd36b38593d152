"""One browser for the tests of a file: starting one takes longer than most of them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., AbstractContextManager[Any]]]:
    """`with browse(width=390, phone=True) as page`: its window, with such a screen (see Page.become)."""
    from chromium import Page, browser

    with browser(tmp_path_factory.mktemp("profile")) as page:

        @contextmanager
        def window(**screen: Any) -> Iterator[Page]:
            page.become(**screen)
            yield page

        yield window
