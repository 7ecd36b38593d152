"""What leaves the device and comes back: storages, whatever views of them there are."""

import torch

from valor.engines.megatron.memory import HostMemory


def test_views_are_there_again_after_their_storage_has_left():
    buffer, shared = torch.arange(6.0), torch.arange(3.0)
    views = [buffer[:2], buffer[2:].view(2, 2)]
    memory = HostMemory()
    memory.leave([*views, shared[1:]], besides=[shared])
    memory.leave(views)
    assert buffer.untyped_storage().nbytes() == 0 and shared.untyped_storage().nbytes() == 12
    memory.come_back()
    assert buffer.tolist() == [0, 1, 2, 3, 4, 5] and views[1].tolist() == [[2, 3], [4, 5]]
    views[0].fill_(9.0)
    assert buffer.tolist() == [9, 9, 2, 3, 4, 5]
