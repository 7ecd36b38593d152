from valor.rollout.base import Request, SamplingParams
from valor.rollout.native.requests import Group, Waiting


def request(name: str, prompt: list[int], tokens: int = 10) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=tokens))


def queue(requests: list[Request], max_num_seqs: int = 100) -> Waiting:
    waiting = Waiting(max_num_seqs)
    waiting.add(requests)
    return waiting


def names(groups: list[Group]) -> list[list[str]]:
    return [[request.request_id for request in group.members] for group in groups]


def test_samples_of_a_prompt_are_grouped_and_long_prompts_come_first() -> None:
    waiting = queue([request("a", [1]), request("b", [1, 2, 3]), request("c", [1]), request("d", [4])])
    assert names(waiting.admit(0)) == [["b"], ["a", "c"], ["d"]]
    assert not waiting


def test_a_group_is_split_only_when_it_cannot_fit_at_all() -> None:
    waiting = queue([request(f"a{i}", [1, 2]) for i in range(5)] + [request(f"b{i}", [1]) for i in range(3)], 4)
    assert names(waiting.admit(0)) == [["a0", "a1", "a2", "a3"]]
    assert names(waiting.admit(0)) == [["a4"], ["b0", "b1", "b2"]]
    waiting = queue([request("a", [1, 2])] + [request(f"b{i}", [1]) for i in range(3)], 3)
    assert names(waiting.admit(0)) == [["a"]]
    assert names(waiting.admit(1)) == []
    assert names(waiting.admit(0)) == [["b0", "b1", "b2"]]


def test_requests_join_once_a_quarter_of_the_rows_is_free() -> None:
    waiting = queue([request(str(i), [i]) for i in range(20)], max_num_seqs=8)
    assert len(waiting.admit(0)) == 8
    assert not waiting.can_join(7)
    assert waiting.can_join(6)
    assert len(waiting.admit(6)) == 2


def test_what_comes_later_waits_behind_longer_prompts_and_those_of_its_length() -> None:
    waiting = queue([request("a", [1, 2]), request("b", [3])])
    waiting.add([request("c", [4]), request("d", [1, 2, 3]), request("e", [4])])
    assert names(waiting.admit(0)) == [["d"], ["a"], ["b"], ["c", "e"]]


def test_sharing_pays_for_long_prompts_with_several_samples() -> None:
    long, short = list(range(40)), [1, 2]
    assert queue([request("a", long), request("b", long)]).worth_sharing()
    assert not queue([request("a", short), request("b", short)]).worth_sharing()
    assert not queue([request("a", long), request("b", long[1:])]).worth_sharing()
