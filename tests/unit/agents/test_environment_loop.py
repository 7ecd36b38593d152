"""The loop of text environments, with a policy that says what the test has written down."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from valor.agents.chat import Chat
from valor.agents.env_loop import EnvLoop
from valor.agents.episode import Episode, EpisodeFailed
from valor.agents.loops import Limits, LoopContext, Task
from valor.config import load
from valor.errors import UserError
from valor.lab.arithmetic import make_tokenizer
from valor.rollout.base import Output, SamplingParams, Span
from valor.user_files import load_object

WORLD = '''
import asyncio
from valor.agents import Env, Step
from valor.errors import UserError

LOG = []

class World(Env):
    """Repeats what was said; "win" ends it, "half" is worth a half, and so on."""

    def __init__(self, opening=None, final=0.0):
        self.opening, self.final = opening, final

    def reset(self, row):
        LOG.append("open")
        return self.opening

    async def step(self, text):
        LOG.append(text)
        if text == "raise":
            raise ValueError("the world broke")
        if text == "sleep":
            await asyncio.sleep(30)
        if text == "wrong":
            return "only a text"
        if text == "picture":
            return Step([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], 0.0, False)
        if text == "gym":
            return "seen", 0.0, True, False, {}
        if text in ("none", "int"):
            return Step({"none": None, "int": 5}[text], 0.0, False)
        if text == "one":
            return Step({"role": "user", "content": "alone"}, 0.0, False)
        if text == "stop":
            raise UserError("fix this")
        return Step(f"you said {text}<|end|>", 0.5 if text == "half" else None, text == "win")

    def score(self):
        LOG.append("score")
        return self.final

    def close(self):
        LOG.append("close")
'''
MESSAGES = [{"role": "user", "content": "Go."}]


@pytest.fixture
def world(tmp_path: Path) -> str:
    path = tmp_path / "world.py"
    path.write_text(WORLD)
    return f"{path}:World"


def loop_of(world: str, *overrides: str, response: int = 200) -> EnvLoop:
    key = "actor_rollout_ref.rollout"
    config = load([f"{key}.agent.environment={world}", f"{key}.multi_turn.tool_timeout=0.5", *overrides]).config
    assert config.default_agent_loop in ("environment_agent", "tool_agent")
    return EnvLoop(LoopContext(config, Chat(make_tokenizer()), Limits(response, 1000)))


def play(loop: EnvLoop, *texts: str) -> tuple[Episode, list[str]]:
    """The episode in which the policy says these texts, and the prompts that it was given."""
    prompts: list[str] = []

    async def generate(prompt_ids: Sequence[int], params: SamplingParams, seed: Any) -> Output:
        prompts.append(loop.chat.decode(prompt_ids))
        ids = [*loop.chat.ids(texts[len(prompts) - 1]), loop.chat.tokenizer.eos_token_id]
        reason = "stop" if len(ids) <= params.max_tokens else "length"
        ids = ids[: params.max_tokens]
        return Output("", ids, [-1.0] * len(ids), reason, (Span(len(ids), 0),))

    row = {"messages": MESSAGES, "ground_truth": None, "data_source": "d", "extra_info": {}, "uid": "0:1"}
    task = Task((0, 0, 0), loop.chat.ids("Go."), SamplingParams(max_tokens=200), row)
    return asyncio.run(loop.run(task, generate)), prompts


def log_of(loop: EnvLoop) -> list[str]:
    name = loop.context.config.actor_rollout_ref.rollout.agent.environment
    return load_object(name.replace(":World", ":LOG"), "test")


def test_what_a_tool_of_verl_calculates_is_recorded_beside_the_environments_score(world: str, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(
        "from valor.agents import BaseTool\nclass T(BaseTool):\n    async def calc_reward(self, i, **kw): return 5.0\n"
    )
    schema = "{function: {name: t}}"
    tools = f"tools: [{{class_name: '{tmp_path}/tools.py:T', tool_schema: {schema}}}]"
    (tmp_path / "tools.yaml").write_text(tools)
    multi = "actor_rollout_ref.rollout.multi_turn"
    episode, _ = play(loop_of(world, f"{multi}.enable=true", f"{multi}.tool_config_path={tmp_path}/tools.yaml"), "win")
    assert (episode.outcome, episode.info["tool_reward"]) == (0.0, 5.0)


def test_turns_their_rewards_and_the_end(world: str) -> None:
    loop = loop_of(world, "actor_rollout_ref.rollout.agent.environment_kwargs={final: 2.0}")
    episode, prompts = play(loop, "hi", "half", "win")
    assert (episode.finish_reason, episode.outcome) == ("stop", 2.0)
    assert [turn.reward for turn in episode.turns] == [0.0, 0.5, 0.0]
    first = "<|user|>Go.<|assistant|>"
    # What the environment wrote of a special token is characters to the policy.
    assert prompts == [
        first,
        first + "hi<|end|><|user|>you said hi<|end|><|assistant|>",
        first + "hi<|end|><|user|>you said hi<|end|><|assistant|>half<|end|><|user|>you said half<|end|><|assistant|>",
    ]
    told = episode.turns[1].observation_ids
    assert told.count(loop.chat.tokenizer.eos_token_id) == 0
    assert log_of(loop) == ["close", "open", "hi", "half", "win", "score", "close"]  # the first one of a mere trial
    assert loop.grades


@pytest.mark.parametrize(
    ("opening", "prompt"),
    [
        ("'A room.'", "<|user|>Go.\nA room.<|assistant|>"),
        ("[{role: system, content: S}, {role: user, content: U}]", "<|system|>S<|user|>U<|assistant|>"),
    ],
)
def test_the_environment_may_add_to_the_prompt_or_replace_it(world: str, opening: str, prompt: str) -> None:
    loop = loop_of(world, f"actor_rollout_ref.rollout.agent.environment_kwargs={{opening: {opening}}}")
    episode, prompts = play(loop, "win")
    assert prompts == [prompt] and episode.prompt_ids == loop.chat.ids(prompt)


def test_one_message_may_stand_alone(world: str) -> None:
    options = "actor_rollout_ref.rollout.agent.environment_kwargs={opening: {role: user, content: U}}"
    _, prompts = play(loop_of(world, options), "one", "win")
    assert prompts == ["<|user|>U<|assistant|>", "<|user|>U<|assistant|>one<|end|><|user|>alone<|assistant|>"]


def test_no_score_leaves_the_episode_to_a_grader(world: str) -> None:
    loop = loop_of(world, "actor_rollout_ref.rollout.agent.environment_kwargs={final: null}")
    assert play(loop, "win")[0].outcome is None


def test_limits_cut_off_after_the_environment_has_heard_the_turn(world: str) -> None:
    loop = loop_of(world, "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2")
    episode, _ = play(loop, "a", "half")
    assert episode.finish_reason == "turns" and episode.turns[1].reward == 0.5
    loop = loop_of(world, response=4)
    episode, _ = play(loop, "half")  # four tokens, and none left for the end
    assert episode.finish_reason == "length" and episode.turns[0].reward == 0.5
    loop = loop_of(world, response=20)
    episode, _ = play(loop, "a", "never")  # what it is told leaves no room
    assert episode.finish_reason == "length" and len(episode.turns) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise", r"step\(\) raised ValueError: the world broke"),
        ("gym", r"step\(\) returned tuple .*: return Step\(messages, reward, done\)"),
        ("none", "the environment answered with nothing, which is neither a text nor messages"),
        ("int", r"the environment answered with int \('5'\), which"),
        ("sleep", r"step\(\) gave no answer within 0.5 s"),
        ("wrong", r"step\(\) returned str"),
        ("picture", "answered with an image, and the run reads text: set data.image_key"),
    ],
)
def test_what_fails_is_the_episodes_error_and_the_environment_is_closed(world: str, text: str, said: str) -> None:
    loop = loop_of(world)
    with pytest.raises(EpisodeFailed, match=said):
        play(loop, text)
    assert log_of(loop)[-1] == "close"


def test_a_users_mistake_ends_the_run(world: str) -> None:
    with pytest.raises(UserError, match="fix this"):
        play(loop_of(world), "stop")
    with pytest.raises(UserError, match="unexpected keyword argument 'colour'"):
        loop_of(world, "actor_rollout_ref.rollout.agent.environment_kwargs={colour: red}")


def test_several_loops_are_not_guessed_between(world: str) -> None:
    with pytest.raises(UserError, match="are different loops: set"):
        loop_of(world, "do_search=true")


SHOP = '''
from valor.agents import Env, Step

class Shop(Env):
    """Sells by a tool, haggles in words, and throws out who says "bye"."""

    tools = ("buy",)

    def reset(self, row):
        self.heard_texts, self.bought = [], 0
        return [{"role": "user", "content": "Welcome."}]

    def heard(self, text):
        self.heard_texts.append(text)
        return text == "bye"

    async def step(self, text):
        return Step("No.", -0.5)

    def buy(self, count: int) -> str:
        """Buy things.

        Args:
            count: How many.
        """
        self.bought += count
        return f"{self.bought} bought"

    def score(self):
        return float(self.bought + 10 * len(self.heard_texts))
'''


def test_an_environment_with_tools_answers_words_too_and_hears_all(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    loop = loop_of(f"{tmp_path}/shop.py:Shop")
    assert [schema["function"]["name"] for schema in loop.schemas] == ["buy"] and loop.grades
    call = '<tool_call>{"name": "buy", "arguments": {"count": 2}}</tool_call>'
    episode, prompts = play(loop, "cheaper?", call, "bye")
    assert (episode.finish_reason, episode.outcome) == ("stop", 32.0)
    assert [turn.reward for turn in episode.turns] == [-0.5, 0.0, 0.0]
    assert prompts[0].endswith("<|user|>Welcome.<|assistant|>") and prompts[2].endswith("2 bought<|assistant|>")
    assert [call["name"] for call in episode.info["calls"]] == ["buy"]


def test_the_old_names_are_told() -> None:
    with pytest.raises(ImportError, match=r"TextEnvironment is now Env, and its open\(\) reset\(\)"):
        from valor.agents import TextEnvironment  # noqa: F401
