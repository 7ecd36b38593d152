"""`actor_rollout_ref.model` and `critic.model`: which network, and how it is loaded."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveFloat

from valor.config.base import PathStr, Section, inherits, key

DEFAULT_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_NO_ADAPTER = {".lora_rank": "", ".lora_adapter_path=null": "the adapter at lora_adapter_path says which"}


class BackboneConfig(Section):
    """What policy and value models share."""

    path: PathStr = DEFAULT_MODEL
    """Hugging Face hub id or local directory."""
    trust_remote_code: bool = False
    """Run Python code that the model directory brings along."""
    override_config: dict[str, Any] = key({})
    """Attributes of the Hugging Face config to replace, such as attn_implementation."""
    external_lib: str | None = None
    """Python module(s) to import before loading, separated by commas (they register architectures)."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass instead of keeping them."""
    use_remove_padding: bool = True
    """Policy and critic read the rows of a micro-batch one behind the other; false pads them to the longest."""
    share_prefixes: bool = key(True, ".use_remove_padding")
    """Tokens with which several rows of a micro-batch begin, such as the prompt of a group, are computed once."""
    compile: bool = key(False, ".use_remove_padding")
    """Training passes by torch.compile, checked against the plain ones at the start; needs a C++ compiler on CPUs."""
    use_liger: bool = False
    """Liger's kernels (`pip install valor-rl[liger]`) for norms, rotary positions and activations; needs a GPU."""
    lora_rank: NonNegativeInt = 0
    """Rank of LoRA adapters, which alone are trained (with a critic's head); 0 trains all weights."""
    lora_alpha: PositiveFloat = key(16, ".lora_rank")
    """LoRA scale: adapters are multiplied by lora_alpha / lora_rank."""
    target_modules: str | list[str] = key("all-linear", _NO_ADAPTER)
    """Layers that get adapters: all-linear (all below the head), names or ends of names, or one regular expression."""
    exclude_modules: str | list[str] | None = key(None, _NO_ADAPTER)
    """Layers that get none, named in the same way."""
    lora_adapter_path: PathStr | None = None
    """Directory of adapters to go on from: `adapter` in an export, or one of peft's."""

    def contradictions(self, at: str) -> Iterator[str]:
        if self.lora_adapter_path is not None and not self.lora_rank:
            yield f"{at}lora_adapter_path={self.lora_adapter_path} needs {at}lora_rank: set it to that adapter's rank"


class ModelConfig(BackboneConfig):
    """The policy, which is also the reference model and, with rollout.name=native, the generator."""

    tokenizer_path: PathStr | None = None
    """Tokenizer, if it is not beside the model."""
    custom_chat_template: str | None = None
    """Jinja text that replaces the tokenizer's chat template."""


class CriticModelConfig(
    BackboneConfig,
    path=inherits("actor_rollout_ref.model.path"),
    trust_remote_code=inherits("actor_rollout_ref.model.trust_remote_code"),
):
    """The value model: a causal language model with a token-classification head, or a published critic."""

    value_head_init: Literal["zero", "normal"] = "zero"
    """Fresh value head: all zeros, or small normal weights. A published critic keeps its own."""
