"""Functions of a Python session as graders: both forms, weights, None, and the way to another process."""

import os
import re
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch

from valor.errors import UserError
from valor.rewards.custom import CustomFunction
from valor.rewards.executor import RewardExecutor
from valor.rewards.functions import RewardFunctions
from valor.rewards.worker import Sample
from valor.user_files import pickled, unpickled

CHAT = [{"role": "user", "content": "?"}]


def verl_form(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0 if solution_str == ground_truth else 0.0, "seen": extra_info["level"]}


def by_length(completions, level, **columns):
    return [len(text) * one for text, one in zip(completions, level, strict=True)]


def only_chats(completions, prompts):
    return [c[0]["content"].count("b") if p == CHAT else None for c, p in zip(completions, prompts, strict=True)]


async def slow(completions, **columns):
    return [0.5 for _ in completions]


def loaded(*args, **kwargs):
    """A model of transformers, to one who asks what it takes."""


loaded.save_pretrained = print  # type: ignore[attr-defined]


def call(functions, weights, *samples):
    names = CustomFunction("", whole_batch=len(samples) > 1).arguments(verl_form).values()
    fields = samples[0] if len(samples) == 1 else map(list, zip(*samples, strict=True))
    return RewardFunctions(functions, weights)(**dict(zip(names, fields, strict=True)))


def test_one_function_keeps_what_it_returns():
    assert call([verl_form], None, ("s", "42", "42", {"level": 3})) == {"score": 1.0, "seen": 3}
    assert call([by_length], None, ("s", "abc", None, {"level": 2, "prompt": "x"})) == 6


def test_scores_are_added_with_their_weights_and_none_is_left_out():
    one = ("s", "bb", "bb", {"level": 3, "prompt": CHAT})
    total = call([verl_form, only_chats], [0.5, 2.0], one)
    assert total.pop("step_rewards") == []
    assert total == {"score": 0.5 * 1 + 2.0 * 2, "seen": 3, "verl_form": 1.0, "only_chats": 2.0}
    without = call([verl_form, only_chats], [0.5, 2.0], ("s", "bb", "bb", {"level": 3, "prompt": "plain"}))
    assert without == {"score": 0.5, "step_rewards": [], "seen": 3, "verl_form": 1.0}
    nothing = call([only_chats], None, ("s", "bb", None, {"prompt": "plain"}))
    assert nothing["error"] == "none of only_chats gave this sample a score"


def test_a_function_named_as_what_graders_return_is_one_component():
    def score(completions):
        return [2.0 for _ in completions]

    def correct(completions):  # whose mean would be overwritten by the share of positive scores
        return [0.0 for _ in completions]

    total = call([score, correct], [0.5, 1.0], ("s", "bb", None, {}))
    assert total == {"score": 1.0, "step_rewards": [], "score_": 2.0, "correct_": 0.0}


def test_a_column_never_takes_the_place_of_what_is_generated():
    seen = {}

    def keeps(completions, prompts=None, completion_ids="none", **columns):
        seen.update(columns, completions=completions, prompts=prompts, completion_ids=completion_ids)
        return [0.0] * len(completions)

    names = ("completions", "prompts", "completion_ids", "ground_truth", "solution_str", "level")
    call([keeps], None, ("s", "said", "4", {**dict.fromkeys(names, "from the row"), "prompt": "asked"}))
    assert (seen["completions"], seen["prompts"], seen["ground_truth"]) == (["said"], ["asked"], ["4"])
    assert seen["completion_ids"] == "none" and seen["level"] == ["from the row"]


def test_rewards_by_step_of_several_functions_add_up_with_their_weights():
    def first(data_source, solution_str, ground_truth, extra_info):
        return {"score": 1.0, "step_rewards": [(0, 1.0), ((0, 2), -1.0)]}

    def second(completions):
        return [{"score": 0.0, "step_rewards": [(1, 0.25)]} for _ in completions]

    steps = call([first, second], [0.5, 2.0], ("s", "bb", "bb", {}))["step_rewards"]
    assert steps == [(0, 0.5), ((0, 2), -0.5), (1, 0.5)]


def test_functions_in_verls_form_for_batches_get_lists(tmp_path):
    def longest(data_sources, solution_strs, ground_truths, extra_infos, transcripts):
        assert transcripts == solution_strs
        return [float(len(text) == max(map(len, solution_strs))) for text in solution_strs]

    path = tmp_path / "reward.pkl"
    path.write_bytes(pickled(RewardFunctions([longest, slow], [1.0, 2.0]), "reward", "key"))
    samples = [Sample("s", "abc", None, {}), Sample("s", "a", None, {})]
    with RewardExecutor(num_workers=1, custom=CustomFunction(str(path), whole_batch=True)) as graders:
        results = graders.score(samples)
    assert [(result.error, result.score) for result in results] == [(None, 2.0), (None, 1.0)]
    with pytest.raises(UserError, match=r"takes lists .* reward\.reward_manager\.name=batch"):
        RewardExecutor(custom=CustomFunction(str(path)))


def test_a_column_that_a_row_lacks_is_none():
    """Parquet and data sets have nulls in the rows' place."""
    hinted = lambda completions, hint, level=0, **columns: [(hint[0], level)]  # noqa: E731
    assert call([hinted], None, ("s", "a", None, {"hint": "x"})) == ("x", 0)
    assert call([hinted], None, ("s", "a", None, {"level": 2})) == (None, [2])
    assert RewardFunctions([hinted, verl_form]).needs == {"hint"}
    of_fields = lambda completions, data_source, extra_info: [(data_source[0], extra_info[0])]  # noqa: E731
    assert call([of_fields], None, ("s", "a", None, {"hint": "x"})) == ("s", {"hint": "x"})
    assert not RewardFunctions([of_fields]).needs


def test_several_partials_have_names_that_one_gives_them():
    def biased(completions, bias):
        return [{"bias": bias}] if bias < 0 else [bias] * len(completions)

    few, many = partial(biased, bias=1.0), partial(biased, bias=2.0)
    with pytest.raises(UserError, match="same name"):
        RewardFunctions([few, many])
    few.__name__, many.__name__ = "few", "many"  # type: ignore[attr-defined]
    assert call([few, many], None, ("s", "a", None, {})) == {"score": 3.0, "step_rewards": [], "few": 1.0, "many": 2.0}
    with pytest.raises(ValueError, match=r"partial\(\) returned a dict without 'score' \(it has bias\)"):
        call([partial(biased, bias=-1.0), many], None, ("s", "a", None, {}))


def test_a_whole_batch_is_one_call():
    rows = [("s", "a", None, {"level": 1}), ("s", "abcd", None, {"level": 2})]
    assert call([by_length], None, *rows) == [1, 8]
    with pytest.raises(ValueError, match="returned 1 scores for 2 samples"):
        call([by_length, lambda completions: [0.0]], None, *rows)


def test_graders_in_their_processes_take_closures_and_async_functions(tmp_path):
    factor = 3.0
    path = tmp_path / "reward.pkl"
    path.write_bytes(
        pickled(RewardFunctions([lambda completions, level: [factor * level[0]], slow], [1.0, 10.0]), "reward", "key")
    )
    with RewardExecutor(num_workers=1, custom=CustomFunction(str(path))) as graders:
        result = graders.score([Sample("s", "abc", None, {"level": 2})])[0]
    assert (result.error, result.score) == (None, 11.0)
    assert result.components == {"<lambda>": 6.0, "slow": 0.5}


def test_what_cannot_travel_is_one_line():
    lock = threading.Lock()
    with pytest.raises(UserError, match=r"cannot travel to other processes .*lock") as error:
        pickled(RewardFunctions([lambda completions: [float(lock.locked())]]), "reward", "key")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("functions", "weights", "line"),
    [
        (
            [lambda text: 0.0],
            None,
            "<lambda>(text) must take (data_source, solution_str, ground_truth, extra_info), lists",
        ),
        ([by_length, by_length], None, "have the same name"),
        ([by_length], [1.0, 2.0], "reward_weights=[1.0, 2.0]: give a list, with a number for each function"),
        ([by_length], ["a"], "reward_weights=['a']: give a list"),
        ([by_length], 2, "reward_weights=2: give a list"),
        ([], None, "reward is an empty list"),
        ([max], None, "a function is expected, (data_source, solution_str, ground_truth, extra_info), lists"),
        (["gsm8k"], None, "a function is expected"),
        ([loaded], None, "got function; a reward model is reward__reward_model__enable=True, reward__reward_model__m"),
        ([lambda completions, completion_ids: []], None, "asks for completion_ids"),
    ],
)
def test_mistakes_are_told_before_the_run(functions, weights, line):
    with pytest.raises(UserError, match=re.escape(line)):
        RewardFunctions(functions, weights)


def test_one_score_for_a_list_of_completions_is_told_apart():
    with pytest.raises(TypeError, match=r"single\(\) returned 1\.0, not a list with a score for each sample"):

        def single(completions):
            return 1.0

        RewardFunctions([single])(data_source="own", solution_str="a", ground_truth=None, extra_info={})


def test_the_same_code_in_two_sessions_is_the_same_file(tmp_path):
    code = """
import sys
from valor.rewards.functions import RewardFunctions
from valor.user_files import pickled
made = compile("def reward(completions, **columns):\\n    return [help_with(c) for c in completions]\\n"
               "class Length:\\n    of = len\\n"
               "WORDS = {'one', 'two', 'three', 'four', 'five', 'six', 'seven'}\\nALSO = WORDS\\n"
               "def help_with(text):\\n    assert text in {'abc', 'def', 'ghi'} and WORDS is ALSO and 'six' in WORDS\\n"
               "    return Length.of(text)", f"/tmp/ipykernel_{sys.argv[1]}/17.py", "exec")
exec(made)  # as two notebooks compile their cells
sys.stdout.buffer.write(pickled(RewardFunctions([reward]), "reward", "key"))
"""
    first, second = (
        subprocess.run(
            [sys.executable, "-c", code, number],
            capture_output=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": number},
        ).stdout
        for number in "12"
    )
    assert first == second
    (tmp_path / "reward.pkl").write_bytes(first)
    assert (
        unpickled(str(tmp_path / "reward.pkl"))(data_source="", solution_str="abc", ground_truth=None, extra_info={})
        == 3
    )


def test_a_model_that_a_function_holds_is_its_weights_and_not_where_they_are(tmp_path):
    def scored(completions, model):
        return [model(torch.ones(1)).item() for _ in completions]

    models = [torch.nn.Linear(1, 1) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    first, second = (pickled(RewardFunctions([partial(scored, model=model)]), "reward", "key") for model in models)
    assert first == second
    (tmp_path / "reward.pkl").write_bytes(first)
    arguments = {"data_source": "", "solution_str": "", "ground_truth": None, "extra_info": {}}
    assert unpickled(str(tmp_path / "reward.pkl"))(**arguments) == models[0](torch.ones(1)).item()


def test_a_changed_module_of_the_users_own_is_another_reward(tmp_path, monkeypatch):
    """It is pickled by name: what is resumed, and the folder of inputs, would be those of the old one."""
    monkeypatch.syspath_prepend(tmp_path)
    file, path = tmp_path / "own_rewards.py", tmp_path / "reward.pkl"
    file.write_text("def right(completions):\n    return [1.0]\n")
    from own_rewards import right  # type: ignore[import-not-found]

    first = pickled(RewardFunctions([right]), "reward", "key")
    assert first == pickled(RewardFunctions([right]), "reward", "key")
    path.write_bytes(first)
    assert unpickled(str(path))(data_source="", solution_str="", ground_truth=None, extra_info={}) == 1.0
    library = pickled(RewardFunctions([lambda completions: re.escape(completions[0])]), "reward", "key")
    file.write_text("def right(completions):\n    return [2.0]\n")
    assert first != pickled(RewardFunctions([right]), "reward", "key")
    assert library.endswith(b".")  # the end of a pickle
    monkeypatch.delitem(sys.modules, "own_rewards")
    file.unlink()
    with pytest.raises(UserError, match=r"No module named 'own_rewards'\): put its folder on PYTHONPATH"):
        unpickled(str(path))


def test_a_file_may_hold_a_function_of_completions(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def right(completions, answer, **columns):\n    assert 'prompts' not in columns\n"
        "    return [float(a in c) for a, c in zip(answer, completions, strict=True)]\n"
        "def needs(completions, prompts):\n    return [0.0]\n"
    )
    with RewardExecutor(num_workers=1, custom=CustomFunction(str(file), "right")) as graders:
        assert graders.submit(Sample("own", "it is 7", "7", {"answer": "7"})).result(60).score == 1.0
    with pytest.raises(UserError, match=r"has no 'compute_score' .it has right, needs"):
        CustomFunction(str(file)).load()
    with pytest.raises(UserError, match="no prompts are passed"):
        CustomFunction(str(file), "needs").load()
    with pytest.raises(UserError, match="no reward_kwargs are passed"):
        CustomFunction(str(file), "right", {"bonus": 1}).load()
