"""Tools that answer with images, and a policy that says what the test has written down: what it is shown, and where."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tiny_vision import IMAGE, make_model, picture
from valor.agents.agents import Agents
from valor.agents.episode import Episode, EpisodeFailed, episode_rows
from valor.agents.loops import Task
from valor.config import PPOConfig, load
from valor.data.images import image_files, image_ids
from valor.errors import UserError
from valor.models.load import load_image_files, load_policy_tokenizer
from valor.rollout.base import Output, SamplingParams, Span

MULTI, AGENT = "actor_rollout_ref.rollout.multi_turn", "actor_rollout_ref.rollout.agent"
FILES = {
    "tools.yaml": "tools:\n  - class_name: sub_agent\n",
    "functions.py": """
from tiny_vision import picture
from valor.agents import ToolResponse, ToolResult, function_tool

@function_tool
def show(count: int):
    '''Show pictures.

    Args:
        count: how many
    '''
    return ToolResponse(text="these", image=[picture(16, 16, 50 + seed) for seed in range(count)])

@function_tool
def parts():
    '''Show a picture as TRL's tools do.'''
    return [{"type": "text", "text": "this"}, {"type": "image", "image": picture(16, 16, 70)}]

@function_tool
def wrong():
    '''Show what is no picture.'''
    return ToolResult("this", images=["nowhere.png"])
""",
}
SHOW = '<tool_call>{"name": "show", "arguments": {"count": 2}}</tool_call>'
PARTS = '<tool_call>{"name": "parts", "arguments": {}}</tool_call>'
WRONG = '<tool_call>{"name": "wrong", "arguments": {}}</tool_call>'
DELEGATE = '<tool_call>{"name": "delegate", "arguments": {"task": "find"}}</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("vision") / "model")


def command(model: Path, folder: Path) -> list[str]:
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return [
        f"actor_rollout_ref.model.path={model}",
        "data.image_key=images",
        f"data.image_cache={folder / 'cache'}",
        f"{MULTI}.enable=true",
        f"{MULTI}.tool_config_path={folder / 'tools.yaml'}",
        f"{MULTI}.function_tool_path={folder / 'functions.py'}",
        "data.max_response_length=2000",
        "actor_rollout_ref.rollout.max_model_len=8000",
    ]


def play(model: Path, folder: Path, *texts: str) -> tuple[Episode, list[tuple[list[int], str]], Any]:
    """The episode, what each turn was generated from, and the reader of texts."""
    config = load(command(model, folder), PPOConfig).config
    tokenizer = load_policy_tokenizer(config)
    images, prompts = load_image_files(config, tokenizer), list[tuple[list[int], str]]()
    agents = Agents(config, tokenizer, images)

    async def generate(prompt_ids: Sequence[int], params: Any, seed: Any, images: str = "") -> Output:
        ids = [*agents.chat.ids(texts[len(prompts)]), tokenizer.eos_token_id]
        prompts.append((list(prompt_ids), images))
        return Output("", ids, [-1.0] * len(ids), "stop", (Span(len(ids), 0),))

    message = {"role": "user", "content": "<image>Go."}
    parts = [{"type": "image"}, {"type": "text", "text": "Go."}]
    ids, named = images.encode(agents.chat.render([{**message, "content": parts}]), [picture(24, 16, 0)], "row")
    row = {"messages": [message], "extra_info": {}, "ground_truth": None, "uid": "0:1", "images": named}
    task = Task((0, 0, 0), ids, SamplingParams(max_tokens=900), row)
    return asyncio.run(agents.loop_of({}).run(task, generate)), prompts, agents.chat


def test_the_images_of_a_tool_stand_before_its_text(model: Path, tmp_path: Path) -> None:
    episode, prompts, chat = play(model, tmp_path, SHOW, "done")
    (first, before), (second, after) = prompts
    assert [place for _, place in image_files(before)] == [first.index(IMAGE)]
    for file, place in image_files(after):
        ids = image_ids(file)
        assert second[place : place + len(ids)] == ids and ids.count(IMAGE) == int(file.split("-")[-1].split(".")[0])
    assert len(image_files(after)) == 3 and after.startswith(before)
    told = chat.decode([token for token in episode.turns[1].observation_ids if token != IMAGE])
    assert "<|im_start|>tool\n<|open|><|close|><|open|><|close|>these<|im_end|>" in told
    (row,) = episode_rows([episode]).objects["images"]
    assert row == after
    (call,) = episode.info["calls"]
    assert call["images"] == [file for file, _ in image_files(after)[1:]]


def test_an_image_in_a_part_is_shown(model: Path, tmp_path: Path) -> None:
    episode, prompts, chat = play(model, tmp_path, PARTS, "done")
    assert [len(image_files(named)) for _, named in prompts] == [1, 2]
    told = chat.decode([token for token in episode.turns[1].observation_ids if token != IMAGE])
    assert "<|im_start|>tool\n<|open|><|close|>this<|im_end|>" in told


def test_an_image_that_is_none_is_an_error_of_the_call(model: Path, tmp_path: Path) -> None:
    episode, prompts, _ = play(model, tmp_path, WRONG, "done")
    assert episode.info["calls"][0]["error"] == "failed"
    assert "there is no file" in episode.info["calls"][0]["text"] and "nowhere.png" in episode.info["calls"][0]["text"]
    assert prompts[0][1] == prompts[1][1]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
        {"type": "audio", "audio": b"sound"},
        {"type": "video", "video": "clip.mp4"},
        {"type": "image"},
        {"text": "untyped"},
        "plain",
    ],
)
def test_parts_that_a_template_may_leave_out_fail_the_episode(part: Any, model: Path, tmp_path: Path) -> None:
    _, _, chat = play(model, tmp_path, "done")
    shown = [{"role": "user", "content": [{"type": "text", "text": "now"}, part]}]
    with pytest.raises(EpisodeFailed, match=r"the environment answered with a part .* neither text nor an image"):
        chat.read(shown, "the environment")


def test_rows_of_a_sub_agent_have_its_images_alone(model: Path, tmp_path: Path) -> None:
    episode, prompts, _ = play(model, tmp_path, DELEGATE, SHOW, "found", "done")
    counts = [len(image_files(named)) for _, named in prompts]
    assert counts == [1, 0, 2, 1]
    rows = episode_rows([episode]).objects["images"]
    assert [len(image_files(named)) for named in rows] == [1, 2, 1]


@pytest.mark.parametrize("loop", ["gateway_agent", "search_agent"])
def test_loops_that_play_text_are_refused(loop: str, model: Path, tmp_path: Path) -> None:
    function = f"{AGENT}.gateway.function={tmp_path / 'functions.py'}:show"
    more = [f"{AGENT}.default_agent_loop={loop}", function] if loop == "gateway_agent" else ["do_search=true"]
    options = [one for one in command(model, tmp_path) if MULTI not in one]
    with pytest.raises(UserError, match=r"data\.image_key=images: .* plays text episodes"):
        config = load([*options, *more], PPOConfig).config
        Agents(config, load_policy_tokenizer(config)).loop_of({})
