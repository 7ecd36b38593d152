"""What a text environment is: it opens an episode, answers what the policy says, and judges."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from valor.agents.chat import Message


class Step(NamedTuple):
    """An answer to the policy: messages, or a text as one message of the user; a reward for the turn; and whether
    the episode is over, so that nobody reads the messages."""

    messages: Sequence[Message] | str
    reward: float = 0.0
    done: bool = False


class TextEnvironment:
    """The world of one episode. Derive from it, and name the class in `rollout.agent.environment`.

    An object is made for each episode, with `rollout.agent.environment_kwargs`. Its methods never overlap. They may be
    coroutine functions, which must not block; others run in threads, not always in the same one. What a method raises
    is the error of its episode, but a UserError ends the run.
    """

    open_seconds: float | None = None
    """How long `open` may take; None: as long as any call, `rollout.multi_turn.tool_timeout`."""

    def open(self, row: Mapping[str, Any]) -> Any:
        """Begin. Returns the messages that the policy reads first, in place of the row's; a text to be added to the
        row's last message; or None: the row's messages as they are.

        `row`: messages, ground_truth, data_source, extra_info, uid.
        """

    def step(self, text: str) -> Any:
        """Answer what the policy said: a Step, or a tuple (messages, reward, done)."""
        raise NotImplementedError

    def score(self) -> Any:
        """What the episode is worth beside its steps' rewards, asked when it has ended for whatever reason. None: a
        grader shall say, by the row's data_source."""
        return 0.0

    def close(self) -> Any:
        """Let go of everything; also called when `open` has failed."""


def row_number(row: Mapping[str, Any]) -> int:
    """What decides a game that is drawn: `seed` of the row's extra_info, else the row's number in its data files. The
    samples of a prompt play the same game."""
    seed = row["extra_info"].get("seed")
    return int(row["uid"].rpartition(":")[2] if seed is None else seed)
