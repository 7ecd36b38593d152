"""The native engine on a model of its own, in a process where the actor is not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from valor.models.export import plain_weights
from valor.models.policy import PolicyModel
from valor.rollout.native import NativeEngine
from valor.rollout.transfer import checksum


class NativeCopy(NativeEngine):
    """Generates with `policy`, whose weights are written over after every update of the actor's."""

    def __init__(self, policy: PolicyModel, *, eos_token_ids: Sequence[int], max_num_seqs: int) -> None:
        super().__init__(policy.hf, eos_token_ids=eos_token_ids, max_num_seqs=max_num_seqs)
        self._held = dict(plain_weights(policy, policy.state_dict().items()))
        self.weights_version = None

    @torch.no_grad()
    def sync_weights(self, weights: Iterable[tuple[str, Tensor]] | None = None, *, version: int) -> None:
        """Take over `weights`, whole and under the names of the Hugging Face model."""
        if weights is None:
            raise ValueError("this engine has a model of its own: it must be given the policy's weights")
        self.weights_version = self.weights_checksum = None
        for name, tensor in weights:
            self._held[name].copy_(tensor)
        self.weights_checksum = int(torch.stack([checksum(tensor) for tensor in self._held.values()]).sum())
        self.weights_version = version
