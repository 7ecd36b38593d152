"""The rules of the queue between generators and trainer: room, order, age, what is dropped and what is waited for."""

import pytest

from valor.collector.queue import Group, SampleQueue


def filled(capacity=6, max_age=1, strategy="drop", versions=(0, 0, 1, 1)):
    """A queue with a group for each of `versions`, in flight, begun at that version."""
    queue = SampleQueue(capacity, max_age, strategy)
    groups = [Group(number) for number in range(len(versions))]
    for group, version in zip(groups, versions, strict=True):
        queue.begin(group, version)
    return queue, groups


def test_room_counts_what_is_in_flight_and_what_is_finished():
    queue, groups = filled()
    assert (queue.room, queue.num_in_flight, queue.num_finished) == (2, 4, 0)
    queue.finish(groups[2], 1)
    assert (queue.room, queue.num_in_flight, queue.num_finished) == (2, 3, 1)
    assert queue.take(1) == [groups[2]]
    assert queue.room == 3


def test_older_weights_go_first_and_a_batch_is_in_the_order_of_the_data():
    queue, groups = filled(versions=(1, 1, 0, 0))
    for group, oldest in zip(groups, (1, 1, 0, 0), strict=True):
        queue.finish(group, oldest)
    assert queue.take(3) == [groups[0], groups[2], groups[3]]
    assert queue.take(3) == [groups[1]]


def test_the_oldest_token_decides_and_not_when_a_prompt_was_begun():
    queue, groups = filled(versions=(0, 0))
    queue.finish(groups[0], 2)
    assert queue.too_old(2) == [groups[1]] and queue.num_dropped == 1


@pytest.mark.parametrize(("version", "dropped"), [(1, 0), (2, 2), (3, 4)])
def test_what_is_older_than_the_limit_is_dropped_whether_finished_or_not(version, dropped):
    queue, groups = filled()
    queue.finish(groups[0], 0)
    queue.finish(groups[3], 1)
    assert len(queue.too_old(version)) == dropped == queue.num_dropped


def test_begun_again_a_group_is_in_flight_once_and_new():
    queue, groups = filled()
    queue.finish(groups[0], 0)
    queue.begin(groups[0], 5)
    assert queue.groups.count(groups[0]) == 1 and queue.num_in_flight == 4
    assert groups[0] not in queue.too_old(6)


@pytest.mark.parametrize(("strategy", "ready"), [("drop", True), ("wait", False)])
def test_only_wait_holds_the_trainer_for_what_would_become_too_old(strategy, ready):
    queue, groups = filled(strategy=strategy, versions=(0, 1, 1))
    queue.finish(groups[1], 1)
    queue.finish(groups[2], 1)
    assert queue.has(2, next_version=1)
    assert queue.has(2, next_version=2) is ready
    queue.finish(groups[0], 0)
    assert queue.has(2, next_version=2)
    assert queue.take(2) == groups[:2]


def test_there_are_never_more_than_the_finished_ones():
    queue, groups = filled()
    queue.finish(groups[1], 0)
    assert queue.has(1, 0) and not queue.has(2, 0)
