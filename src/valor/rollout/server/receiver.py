"""What a vLLM server needs to take a policy's weights while it runs: `--worker-extension-cls` names the class here.

The server's workers read the weights from files that the trainer has written where both see them, and write them in
place with the checks that the engine in the trainer's own process has (`valor.rollout.vllm.weights`).
"""

# pyright: reportMissingImports=false
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from valor.rollout.vllm.internals import plain_weights_remain
from valor.rollout.vllm.weights import HeldWeights

# A worker imports this file before it loads its model, and computes with that model until the process ends.
_REMAIN = plain_weights_remain()
_REMAIN.__enter__()


class WeightReceiver:
    """Joins vLLM's worker class; its methods are called by name over `/collective_rpc`, and answer with JSON.

    `valor_weights`: the name under which the last complete update was sent; None: what the server was started with.
    """

    device: Any
    model_runner: Any
    parallel_config: Any
    scheduler_config: Any
    valor_weights: str | None = None
    _valor_held: HeldWeights | None = None

    def valor_describe(self) -> dict[str, Any]:
        """Precision, number of replicas times pipeline stages, the name of the present weights, and whether a prompt
        read in parts ends this server: with a seed vLLM 0.30 rewinds its generator, which only GPUs' can do."""
        parallel = self.parallel_config
        return {
            "dtype": str(self.model_runner.dtype).removeprefix("torch."),
            "parts": parallel.data_parallel_size * parallel.pipeline_parallel_size,
            "weights": self.valor_weights,
            "ends_in_parts": self.device.type == "cpu" and self.scheduler_config.enable_chunked_prefill,
        }

    def valor_update(self, folder: str, name: str, version: int) -> dict[str, Any]:
        """Replace all weights by those in the safetensors files of `folder`. Returns `error`, or `checksum`."""
        self.valor_weights = None
        try:
            files = sorted(Path(folder).glob("*.safetensors"))
            if not files:
                raise FileNotFoundError(
                    f"the server finds no weights in {folder}: set actor_rollout_ref.rollout.server.weights_dir to a "
                    "folder that it can read too"
                )
            if self._valor_held is None:
                self._valor_held = HeldWeights(self.model_runner.get_model(), self.model_runner.dtype)
            tensors = (item for file in files for item in load_file(file).items())
            checksum = self._valor_held.write(tensors, version)
        except Exception as error:  # the trainer is told; an exception here would end the server
            return {"error": f"{type(error).__name__}: {error}"}
        self.valor_weights = name
        return {"checksum": str(checksum)}  # JSON's integers are not everyone's
