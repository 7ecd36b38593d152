"""Process groups and devices."""

import pytest
import torch
import torch.distributed as dist

from valor.engines import distributed
from valor.errors import UserError


def test_a_group_of_one_and_back():
    device = distributed.init_process_group("cpu")
    try:
        assert device == torch.device("cpu")
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        assert distributed.init_process_group("cpu") == device
        distributed.leave_process_group()
        assert dist.is_initialized(), "a second run of this process that ends leaves the first its group"
        with pytest.raises(ValueError, match="rank 0 of 1"):
            distributed.init_process_group("cpu", rank=1, world_size=2, address="127.0.0.1", port=1)
        assert distributed.max_over_ranks(7) == 7
    finally:
        distributed.leave_process_group()
    assert not dist.is_initialized()
    distributed.leave_process_group()  # again: nothing happens


def test_a_group_of_the_user_stays():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        distributed.init_process_group("cpu")
        distributed.leave_process_group()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_several_ranks_need_an_address():
    with pytest.raises(ValueError, match="address"):
        distributed.init_process_group("cpu", rank=0, world_size=2)


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert distributed.select_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="no CUDA GPU"):
        distributed.select_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert distributed.select_device("auto", gpu=1) == torch.device("cuda", 1)
    assert distributed.select_device("cpu", gpu=1) == torch.device("cpu")
