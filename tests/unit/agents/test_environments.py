"""Text environments: a real server, and the examples of libraries, behind the same four methods."""

import asyncio
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import openenv_server
from valor.agents.env import Step, env_source, find_env
from valor.errors import UserError
from valor.user_files import load_file

EXAMPLES = Path(__file__).parents[3] / "examples/environments"
SkyRLGym = load_file(f"{EXAMPLES}/skyrl.py", "").SkyRLGym
TextArena = load_file(f"{EXAMPLES}/textarena_game.py", "").TextArena
ReasoningGym = load_file(f"{EXAMPLES}/puzzle.py", "").ReasoningGym
OpenEnv = load_file(f"{EXAMPLES}/openenv.py", "").OpenEnv


def row(truth: Any = None, uid: str = "0:5", **extra_info: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Play."}]
    return {"messages": messages, "data_source": "d", "ground_truth": truth, "extra_info": extra_info, "uid": uid}


class TestSkyRLGym:
    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        pytest.importorskip("skyrl_gym", reason="skyrl-gym is not installed")

    def test_one_turn_is_judged_by_the_rows_truth(self) -> None:
        environment = SkyRLGym("gsm8k")
        assert environment.reset(row("42")) == row()["messages"]
        assert environment.step("so #### 42") == Step([], 1.0, True)
        environment.close()

    def test_turns_have_rewards_and_messages_until_the_answer_is_right(self) -> None:
        environment = SkyRLGym("gsm8k_multi_turn", max_turns=3)
        environment.reset(row("42"))
        first = environment.step("#### 41")
        assert (first.reward, first.done) == (pytest.approx(0.2 / 3), False)
        assert [message["role"] for message in first.messages] == ["user"]
        assert environment.step("#### 42") == Step([], 1.0, True)

    def test_the_environments_own_settings_reach_it(self) -> None:
        config = {"search_url": "http://127.0.0.1:9", "topk": 2, "timeout": 1, "log_requests": False}
        environment = SkyRLGym("search", env_config=config, max_turns=1)
        environment.reset(row({"target": ["Beijing"]}))
        assert environment.step("<answer>Beijing</answer>").done
        environment.close()

    def test_an_unknown_environment_is_told(self) -> None:
        with pytest.raises(UserError, match="SkyRL-Gym, gsm9k"):
            SkyRLGym("gsm9k")


class TestTextArena:
    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        pytest.importorskip("textarena", reason="textarena is not installed")

    def play(self, *guesses: str, **extra_info: Any) -> tuple[str, list[Step], float]:
        environment = TextArena("GuessTheNumber-v0")
        opening = environment.reset(row(**extra_info))
        steps = [environment.step(guess) for guess in guesses]
        return opening, steps, environment.score()

    def test_a_game_is_told_once_and_judged_at_its_end(self) -> None:
        opening, steps, _ = self.play("[1]", "[20]", seed=3)
        assert opening.startswith("[GAME] You are Player 0.")
        assert "You are Player 0" not in steps[0].messages and "[1]" not in steps[0].messages  # neither again
        games = [self.play(f"<think>[4]?</think>[{n}]", seed=3) for n in range(1, 21)]
        won = [score for _, steps, score in games if steps[0].done]
        assert won == [1.0]
        assert {score for _, steps, score in games if not steps[0].done} == {0.0}  # not over, nothing won

    def test_a_seed_decides_the_game_and_nobody_elses_random_numbers_move(self) -> None:
        state = random.getstate()
        guesses = [f"[{n}]" for n in (10, 5, 15)]
        assert self.play(*guesses, seed=11) == self.play(*guesses, seed=11)
        assert random.getstate() == state
        assert len({str(self.play(*guesses, seed=seed)) for seed in range(8)}) > 1

    def test_what_cannot_be_played_is_told(self) -> None:
        with pytest.raises(UserError, match="did you mean GuessTheNumber-v0"):
            TextArena("GuesTheNumber-v0")
        with pytest.raises(UserError, match="take a game for one player"):
            TextArena("TicTacToe-v0").reset(row())


class TestReasoningGym:
    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")

    def puzzle(self) -> dict[str, Any]:
        entry = {"question": "?", "answer": "12", "metadata": {"source_dataset": "leg_counting"}}
        return row("12", entry=entry)

    def test_a_wrong_answer_may_be_followed_by_a_right_one(self) -> None:
        environment = ReasoningGym("leg_counting", tries=3, feedback="no")
        assert environment.reset(self.puzzle()) is None
        assert environment.step("<answer>11</answer>") == Step("no", 0.0, False)
        assert environment.score() < 1.0
        assert environment.step("<answer>12</answer>").done
        assert environment.score() == 1.0

    def test_the_last_try_ends_it(self) -> None:
        environment = ReasoningGym("leg_counting", tries=2)
        environment.reset(self.puzzle())
        assert [environment.step("<answer>1</answer>").done for _ in range(2)] == [False, True]

    def test_an_unknown_task_is_told(self) -> None:
        with pytest.raises(UserError, match="no task 'legs'"):
            ReasoningGym("legs")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server with two sessions, of the package itself where VALOR_OPENENV_PYTHON has it."""
    with openenv_server.serving(2) as address:
        yield address


class TestOpenEnv:
    def test_an_episode(self, server: str) -> None:
        async def play() -> list[Any]:
            environment = OpenEnv(server, observation="text", reset={"by": 2})
            seen: list[Any] = [await environment.reset(row())]
            seen += [environment.score(), *[await environment.step(text) for text in ("7", "8", " 11\n")]]
            await environment.close()
            return [*seen, environment.score()]

        opening, unscored, *steps, score = asyncio.run(play())
        assert opening == "count on from 5 by 2"
        assert unscored is None and score == 0.0
        assert steps == [Step("it was 7", 1.0, False), Step("it was 9", 0.0, False), Step("it was 11", 1.0, True)]

    def test_an_episode_without_any_reward_is_left_to_a_grader(self, server: str) -> None:
        async def play() -> Any:
            environment = OpenEnv(server)
            assert await environment.reset(row(seed=1)) == '{"text": "count on from 1 by 1"}'
            await environment.step("no")
            await environment.close()
            return environment.score()

        assert asyncio.run(play()) is None

    def test_what_the_server_cannot_do_is_an_error_with_its_code(self, server: str) -> None:
        async def play(text: str, **kwargs: Any) -> None:
            environment = OpenEnv(server, **kwargs)
            await environment.reset(row())
            try:
                await environment.step(text)
            finally:
                await environment.close()

        with pytest.raises(RuntimeError, match="EXECUTION_ERROR: the counter broke"):
            asyncio.run(play("boom"))
        with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
            asyncio.run(play("5", action="text"))
        with pytest.raises(KeyError, match="text"):
            asyncio.run(play("5", observation="message"))

    def test_who_finds_all_sessions_taken_waits(self, server: str) -> None:
        async def play(i: int) -> float:
            environment = OpenEnv(server, observation="text")
            await environment.reset(row(seed=i))
            await asyncio.sleep(0.05)
            steps = [await environment.step(str(i + k)) for k in (1, 2, 3)]
            await environment.close()
            return sum(step.reward for step in steps)

        async def play_all() -> list[float]:
            return await asyncio.gather(*map(play, range(8)))

        assert asyncio.run(play_all()) == [3.0] * 8

    @pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://a"])
    def test_an_address_is_an_address(self, url: str) -> None:
        with pytest.raises(UserError, match="no address"):
            OpenEnv(url)


@pytest.mark.parametrize(
    ("name", "kwargs", "said"),
    [
        (f"{EXAMPLES}/openenv.py:OpenEnv", {"trys": 3}, "unexpected keyword argument 'trys'"),
        ("valor.errors.did_you_mean", {}, "derive it from valor.agents.Env"),
        ("nowhere.py:Mine", {}, "no such file"),
        (f"{EXAMPLES}/openenv.py", {}, "openenv.py' must be file.py:Name"),
        ("textarea.Wordle", {}, "cannot be imported"),
    ],
)
def test_an_environment_that_cannot_be_made_is_told(name: str, kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        find_env(name, kwargs)()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def __init__(self): raise OSError('no server')", "the environment cannot be made: OSError: no server"),
        ("def __init__(self): raise SystemExit(4)", "the environment cannot be made: SystemExit: 4"),
        ("tools = ('hnt',)", "cannot be made: AttributeError: 'Mine' object has no attribute 'hnt'"),
        ("tools = ('hint')", "cannot be made: TypeError: tools='hint' must be a list of methods"),
    ],
)
def test_what_its_class_does_wrong_is_told_before_the_run(tmp_path: Path, body: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(f"from valor.agents import Env\nclass Mine(Env):\n    {body}\n")
    with pytest.raises(UserError, match=said):
        env_source(find_env(f"{tmp_path}/mine.py:Mine", {}))


@pytest.mark.parametrize(
    ("module", "name", "kwargs", "remedy"),
    [
        ("skyrl_gym", f"{EXAMPLES}/skyrl.py:SkyRLGym", {"name": "gsm8k"}, "pip install skyrl-gym"),
        ("textarena", f"{EXAMPLES}/textarena_game.py:TextArena", {"game": "G"}, "pip install textarena"),
        ("reasoning_gym.factory", f"{EXAMPLES}/puzzle.py:ReasoningGym", {"task": "t"}, r"valor-rl\[reasoning\]"),
        ("websockets.asyncio.client", f"{EXAMPLES}/openenv.py:OpenEnv", {"url": "http://h"}, r"valor-rl\[agents\]"),
    ],
)
def test_a_library_that_is_missing_is_told(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, kwargs: dict[str, Any], remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=remedy):
        find_env(name, kwargs)()
