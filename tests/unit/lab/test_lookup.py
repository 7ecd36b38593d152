"""The task of the search demonstration: what its data promise; demonstrations have the tokens of episodes."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from valor.agents.agents import Agents
from valor.agents.chat import Chat
from valor.agents.episode import episode_rows
from valor.agents.loops import Task
from valor.agents.search.index import open_index
from valor.config import PPOConfig, SFTConfig, load
from valor.data.demonstrations import DemonstrationDataset
from valor.lab import demo, lookup
from valor.rewards import compute_score
from valor.rollout.base import Output, RequestSource, RolloutEngine, SamplingParams, Span

SIZES = {"num_train": 300, "num_val": 64, "num_demonstrations": 2000}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> lookup.DataFiles:
    return lookup.make_data(tmp_path_factory.mktemp("task"), seed=3, **SIZES)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return lookup.make_model(tmp_path_factory.mktemp("task") / "model", seed=3)


def chats(path: Path) -> list[list[dict[str, str]]]:
    return [row["messages"] for row in pq.read_table(path).to_pylist()]


def test_names_of_validation_occur_in_no_other_question_and_their_numbers_only_in_the_corpus(files):
    train, val = (
        {row["prompt"][0]["content"] for row in pq.read_table(p).to_pylist()} for p in (files.train, files.val)
    )
    demonstrated = {chat[0]["content"] for path in (files.sft_train, files.sft_val) for chat in chats(path)}
    assert (len(train), len(val)) == (300, 64)
    assert not val & (train | demonstrated)
    whole, without = (
        {json.loads(line)["title"] for line in path.read_text().splitlines()}
        for path in (files.corpus, files.corpus_without)
    )
    assert {f"{name}?" for name in whole} == train | val
    assert {f"{name}?" for name in without} == train


def test_a_search_for_the_name_finds_its_number_alone(files):
    whole, without = open_index(files.corpus), open_index(files.corpus_without)
    for row in pq.read_table(files.val).to_pylist():
        name = row["prompt"][0]["content"].removesuffix("?")
        ((document,),) = whole.search([name], 1)
        (number,) = row["reward_model"]["ground_truth"]["target"]
        assert document.contents == f'"{name}"\n{number}'
        assert without.search([name], 1) == [[]]
        right, wrong = f"<answer>{number}</answer>", f"<information>{number}</information><answer>1</answer>"
        scores = [compute_score(lookup.DATA_SOURCE, text, {"target": [number]}) for text in (right, wrong)]
        assert [score["score"] for score in scores] == [1.0, 0.0]  # type: ignore[index]


def test_the_teacher_guesses_as_often_as_is_said_and_is_right_when_he_has_searched(files):
    facts = {f["title"]: f["text"] for f in map(json.loads, files.corpus.read_text().splitlines())}
    all_chats = chats(files.sft_train)
    guesses = [chat for chat in all_chats if len(chat) == 2]
    assert len(guesses) / len(all_chats) == pytest.approx(lookup.GUESS_SHARE, abs=0.05)  # more than four deviations
    for user, *_, last in all_chats:
        number = last["content"].removeprefix("<answer>").removesuffix("</answer>")
        assert int(number) in lookup.NUMBERS
        if [user, last] not in guesses:
            assert number == facts[user["content"].removesuffix("?")]
    guessed_right = sum(last["content"] == f"<answer>{facts[user['content'][:-1]]}</answer>" for user, last in guesses)
    assert guessed_right / len(guesses) < 0.02


def test_data_are_a_function_of_the_seed(files, tmp_path):
    again, other = (lookup.make_data(tmp_path / str(seed), seed, **SIZES) for seed in (3, 4))
    for name in ("train", "val", "sft_train", "sft_val", "corpus", "corpus_without"):
        first = getattr(files, name).read_bytes()
        assert first == getattr(again, name).read_bytes()
        assert first != getattr(other, name).read_bytes()


class Teacher(RolloutEngine):
    """An engine that says given texts, one a turn."""

    weight_mode, parallel_size, weights_version, weights_checksum = "fixed", 1, 0, None

    def __init__(self, chat: Chat, texts: list[str]) -> None:
        self._chat, self._texts = chat, texts

    def serve(self, source: RequestSource) -> None:
        while (requests := source.poll(wait=True)) is not None:
            for request in requests:
                ids = self._chat.ids(self._texts.pop(0))
                assert len(ids) <= request.params.max_tokens
                assert request.params.stop is not None
                assert [request.params.stop.complete(ids[:n]) for n in (len(ids) - 1, len(ids))] == [False, True]
                output = Output(request.request_id, ids, [0.0] * len(ids), "stop", (Span(len(ids), 0),))
                assert request.on_finish is not None
                request.on_finish(output)

    def sync_weights(self, weights=None, *, version) -> None:
        raise NotImplementedError

    def sleep(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def test_demonstrations_have_the_tokens_and_the_mask_of_the_episodes_that_they_show(files, model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = load(demo.ppo_overrides(model, files, tmp_path), PPOConfig).config
    sft = load(demo.sft_overrides(model, files, tmp_path, 0), SFTConfig).config
    shown = DemonstrationDataset(sft.data, tokenizer, "val", 0)
    agents = Agents(config, tokenizer)
    for i, messages in enumerate(chats(files.sft_val)):
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        prompt = Chat(tokenizer).ids(Chat(tokenizer).render(messages[:1]))
        row = {"extra_info": {}, "messages": messages[:1]}
        task = Task((0, 0, i), prompt, SamplingParams(max_tokens=config.data.max_response_length), row)
        rows = episode_rows(agents.runner().run(Teacher(Chat(tokenizer), said), [task]))
        assert rows.objects["finish_reason"] == ["stop"]
        demonstrated = shown[i]
        assert demonstrated.tokens.tolist() == [*prompt, *rows["responses"][0].tolist()]
        assert demonstrated.loss_mask.tolist() == [0] * len(prompt) + rows["response_mask"][0].int().tolist()
        assert demonstrated.prompt_length == len(prompt) == 7
