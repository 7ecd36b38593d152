"""What a vLLM server needs to take a policy's weights while it runs: `--worker-extension-cls` names the class here.

The server's workers read the weights from files that the trainer has written where both see them, and write them in
place with the checks that the engine in the trainer's own process has (`valor.rollout.vllm.weights`).
"""

# pyright: reportMissingImports=false
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from valor.rollout.vllm.weights import HeldWeights, weights_kept

# A worker imports this file before it loads its model, and computes with that model until the process ends.
_KEPT = weights_kept()
_KEPT.__enter__()


class WeightReceiver:
    """Joins vLLM's worker class; its methods are called by name over `/collective_rpc`, and answer with JSON.

    `valor_weights`: the name under which the last complete update was sent; None: what the server was started with.
    """

    model_runner: Any
    parallel_config: Any
    valor_weights: str | None = None
    _valor_held: HeldWeights | None = None

    def valor_describe(self) -> dict[str, Any]:
        """What the trainer must know before it sends anything, and what is held now."""
        parallel = self.parallel_config
        return {
            "dtype": str(self.model_runner.dtype).removeprefix("torch."),
            "parts": parallel.data_parallel_size * parallel.pipeline_parallel_size,
            "weights": self.valor_weights,
        }

    def valor_update(self, folder: str, name: str, version: int) -> dict[str, Any]:
        """Replace all weights by those in the safetensors files of `folder`; their checksum, or what went wrong.

        Told with it: the name of the weights that were held before, and of every request under way, by vLLM's name
        for it, the number of tokens that they have sampled (requests without any, and vLLM's second model runner, tell
        nothing).
        """
        before, self.valor_weights = self.valor_weights, None
        under_way = getattr(self.model_runner, "requests", {})
        sampled = {name: len(one.output_token_ids) for name, one in under_way.items() if one.output_token_ids}
        try:
            files = sorted(Path(folder).glob("*.safetensors"))
            if not files:
                raise FileNotFoundError(
                    f"the server finds no weights in {folder}: set actor_rollout_ref.rollout.server.weights_dir to a "
                    "folder that it can read too"
                )
            if self._valor_held is None:
                self._valor_held = HeldWeights(self.model_runner.get_model(), self.model_runner.dtype)
            checksum = self._valor_held.write(_tensors(files), version)
        except Exception as error:  # the trainer is told; an exception here would end the server
            return {"error": f"{type(error).__name__}: {error}"}
        self.valor_weights = name
        # JSON's integers are not everyone's.
        return {"checksum": str(checksum), "before": before, "sampled": sampled}


def _tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                yield name, file.get_tensor(name)
