"""Weights between processes (here: threads with a process group each) arrive whole, or it is said that they did not."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from valor.rollout.transfer import WeightChannel, buckets, checksum

CPU = torch.device("cpu")
WEIGHTS = {
    "embed": torch.randn(300, 8),
    "bias": torch.randn(7),
    "scalar": torch.tensor(3.5),
    "steps": torch.arange(5),
    "norm": torch.randn(3, dtype=torch.float64),
}


def transfer(weights, takes, *, dtype=torch.float32):
    """Send to as many receivers as there are `takes`; what the sender and each receiver return or raise."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    size = len(takes) + 1

    def send():
        return WeightChannel(store, 0, size, CPU).send(weights, dtype=dtype, bucket_bytes=4096)

    def receive(rank, take):
        client = dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=60))
        return WeightChannel(client, rank, size, CPU).receive(take)

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(send), *(threads.submit(receive, i, t) for i, t in enumerate(takes, 1))]
        return [future.exception() or future.result() for future in futures]


def total(weights):
    return int(torch.stack([checksum(t) for t in weights]).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_receiver_gets_every_tensor_in_the_engines_dtype(dtype):
    taken = [{}, {}]

    def into(held):
        def take(arriving):
            held.update(arriving)
            return total(held.values())

        return take

    sent, *received = transfer(WEIGHTS.items(), [into(held) for held in taken], dtype=dtype)
    assert received == [None, None]
    for held in taken:
        assert list(held) == list(WEIGHTS)
        for name, tensor in WEIGHTS.items():
            expected = tensor.to(dtype) if tensor.is_floating_point() else tensor
            assert held[name].dtype == expected.dtype and torch.equal(held[name], expected)
        assert total(held.values()) == sent


def test_what_did_not_arrive_is_noticed():
    def forgetful(arriving):
        return total([tensor for name, tensor in arriving if name != "bias"])

    def gives_up(arriving):
        next(iter(arriving))
        raise MemoryError("no room")

    _, first, second = transfer(WEIGHTS.items(), [forgetful, gives_up])
    assert isinstance(first, RuntimeError) and "add up to" in str(first)
    assert isinstance(second, MemoryError)


def test_a_sender_that_fails_frees_the_receivers():
    def failing():
        yield "bias", WEIGHTS["bias"]
        raise OSError("lost")

    sender, receiver = transfer(failing(), [lambda arriving: total([t for _, t in arriving])])
    assert isinstance(sender, OSError)
    assert isinstance(receiver, RuntimeError) and "the actor could not send its weights: OSError: lost" in str(receiver)


def test_a_sender_that_fails_takes_all_weights():
    """The ranks gather each tensor together: one that leaves would keep the others there."""
    gathered = []

    def weights():
        for name in "abcde":
            gathered.append(name)
            yield name, torch.zeros(2000)

    class Broken(WeightChannel):
        def __init__(self):
            self._device = CPU

        def _broadcast(self, tensor):
            raise RuntimeError("the receiver is gone")

    with pytest.raises(RuntimeError, match="the receiver is gone"):
        Broken().send(weights(), dtype=torch.float32, bucket_bytes=4096)
    assert gathered == [*"abcde"]


def test_buckets_hold_one_dtype_and_no_more_than_allowed():
    tensors = [(str(i), torch.zeros(n)) for i, n in enumerate([10, 20, 5, 100, 1])]
    found = list(buckets([*tensors, ("ids", torch.arange(3))], torch.float32, CPU, 120))
    assert [[name for name, _ in bucket] for bucket in found] == [["0", "1"], ["2"], ["3"], ["4"], ["ids"]]
