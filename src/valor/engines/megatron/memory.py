"""Moves storages to host and back; views stay valid."""

from collections.abc import Iterable

import torch
from torch import Tensor


class HostMemory:
    """What some tensors hold while their storages on the device are empty."""

    def __init__(self) -> None:
        self._moved: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def leave(self, tensors: Iterable[Tensor], *, besides: Iterable[Tensor] = ()) -> None:
        """Copy to the host and free what `tensors` lie in, but not what the others lie in. Twice is as once."""
        excluded = {tensor.untyped_storage().data_ptr() for tensor in besides}
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        for pointer, storage in storages.items():
            if pointer not in excluded and storage.nbytes():
                self._moved.append((storage, torch.UntypedStorage(storage.nbytes()).copy_(storage, False)))
                storage.resize_(0)

    def come_back(self) -> None:
        for storage, host in self._moved:
            storage.resize_(host.nbytes())
            storage.copy_(host, False)
        self._moved.clear()
