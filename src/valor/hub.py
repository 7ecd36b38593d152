"""The Hugging Face hub, which may be out of reach."""

import os
import sys
from functools import cache

_SECONDS = 3.0


def out_of_reach(path: str) -> str:
    """What to do about a model at `path` that only the hub could have."""
    return (
        f"'{path}' is no local directory, it is not in the cache of the Hugging Face hub, and the hub cannot be "
        f"reached: give a directory that holds it (`hf download {path} --local-dir DIR` where there is a network), or "
        "set HF_ENDPOINT to a mirror"
    )


@cache
def hub_answers() -> bool:
    """Whether the hub can be reached; asked once. If not, this process and its children read only the hub's cache, as
    its libraries would retry each file for a minute."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception as error:  # of whichever HTTP library the hub's client has
        print(f"note: {constants.ENDPOINT} cannot be reached ({error}): only its cache is read", file=sys.stderr)
        os.environ["HF_HUB_OFFLINE"], constants.HF_HUB_OFFLINE = "1", True
        return False
    return True
