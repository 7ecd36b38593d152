"""`actor_rollout_ref.rollout`: how responses are generated."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from valor.config.agent import AgentConfig, MultiTurnConfig
from valor.config.base import BARE_ITEM, CountOrOff, DType, PathStr, PositiveShare, Section, inherits, key, section
from valor.config.profiler import ProfilerConfig


class ValidationSamplingConfig(Section):
    """Sampling during validation."""

    n: PositiveInt = 1
    """Responses per validation prompt (mean@n, pass@k and maj@n need more than one)."""
    temperature: NonNegativeFloat = 0.0
    """Softmax temperature; 0 is greedy."""
    top_k: CountOrOff = -1
    """Sample among the k likeliest tokens; -1 among all."""
    top_p: PositiveShare = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    do_sample: bool | None = None
    """false forces greedy decoding; null samples when temperature is above 0."""

    def contradictions(self, at: str) -> Iterator[str]:
        if self.do_sample and self.temperature == 0:
            yield f"{at}do_sample=true with temperature=0 is greedy: set {at}temperature"

    @property
    def effective_temperature(self) -> float:
        """The temperature that generation uses: 0 where do_sample is false."""
        return 0.0 if self.do_sample is False else self.temperature


class WeightSyncConfig(Section):
    """How weights reach an engine that does not share the actor's."""

    update_weights_bucket_megabytes: PositiveInt = key(
        2048,
        {
            "rollout_apart or actor_rollout_ref.rollout.asks_servers": "the rollout is in the actor's processes",
            "actor_rollout_ref.rollout.keeps_weights=false": "",
        },
    )
    """rollout in a pool of its own, or servers: most of a transfer at once (a larger tensor goes alone)."""


class ServerConfig(Section):
    """Servers (name=server: OpenAI-compatible ones, sglang, trtllm)."""

    base_url: Annotated[list[str], BARE_ITEM] = key([])
    """Address of a server that is running, such as http://localhost:8000/v1, or a list; sglang: [] starts some."""
    model: str = inherits("actor_rollout_ref.model.path")
    """The model's name on the server."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key, if the server wants one."""
    weight_updates: Literal["filesystem", "distributed", "tensor", "none"] = "filesystem"
    """New weights go by filesystem (vLLM, SGLang), by a broadcast (distributed) or memory (tensor; SGLang), or not."""
    weights_dir: PathStr | None = key(None, ".weight_updates=filesystem")
    """Folder of these files, on a path that this machine and the server's share; null: the temporary directory."""
    timeout: PositiveFloat = 600.0
    """Seconds that one response, one update of the weights, or a start may take, and that the last one may be away."""
    sleep: bool = key(False, {"actor_rollout_ref.rollout.name!=server": "vLLM's servers are not put to sleep"})
    """sglang, trtllm: servers at base_url are on the trainer's devices: they give back their memory while it trains."""
    control_key_env: str = key("TRTLLM_RUNTIME_CONTROL_API_KEY", "actor_rollout_ref.rollout.name=trtllm")
    """trtllm: environment variable with the key that signs requests for sleep."""
    log_dir: PathStr = inherits("trainer.default_local_dir", "actor_rollout_ref.rollout.name=sglang")
    """sglang: folder of the logs of servers that are started here."""


class RolloutConfig(Section):
    """Generation."""

    name: str = "native"
    """Engine: native with the actor's own weights, or a copy; vllm with a copy; server, sglang, trtllm ask servers."""
    n: PositiveInt = 1
    """Responses (samples) per prompt."""
    profiler: ProfilerConfig = section(ProfilerConfig, "global_profiler.tool")
    temperature: PositiveFloat = 1.0
    """Softmax temperature; training log-probs use it too."""
    top_k: CountOrOff = -1
    """Sample among the k likeliest tokens; -1 among all."""
    top_p: PositiveShare = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    ignore_eos: bool = False
    """Generate up to the length limit past the end-of-sequence token."""
    max_model_len: PositiveInt = key(1024, derived="data.max_prompt_length + data.max_response_length")
    """Longest prompt plus response in tokens."""
    dtype: DType = inherits("actor_rollout_ref.actor.fsdp_config.dtype", ".keeps_weights=false")
    """Precision of generation."""
    log_prob_micro_batch_size_per_gpu: PositiveInt | None = None
    """Old log-probs: most samples in a forward micro-batch of one process; null leaves it to the token budget."""
    log_prob_use_dynamic_bsz: bool = inherits("actor_rollout_ref.actor.use_dynamic_bsz")
    """Old log-probs: true forms micro-batches by tokens alone."""
    log_prob_max_token_len_per_gpu: PositiveInt = inherits("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    """Old log-probs: most tokens (padding included) in a forward micro-batch of one process."""
    val_kwargs: ValidationSamplingConfig = section(ValidationSamplingConfig, "data.val_files")
    checkpoint_engine: WeightSyncConfig = section(WeightSyncConfig)
    server: ServerConfig = section(ServerConfig)
    multi_turn: MultiTurnConfig = section(MultiTurnConfig)
    agent: AgentConfig = section(AgentConfig)
    nnodes: NonNegativeInt = 0
    """Nodes on which generation has processes of its own, beside those of the trainer; 0 shares the trainer's."""
    n_gpus_per_node: PositiveInt | None = inherits("trainer.n_gpus_per_node", ".nnodes")
    """Processes (one per device) on each such node."""
    gpu_memory_utilization: PositiveShare = 0.5
    """vllm, sglang: share of device memory for weights and KV cache. vllm on a CPU: bounds all KV caches together."""
    tensor_model_parallel_size: PositiveInt = 1
    """vllm, sglang: processes that share one replica."""
    max_num_seqs: PositiveInt = 256
    """Most sequences generated at once by one process (servers: requests in flight)."""
    free_cache_engine: bool = key(
        True, {"trainer.device!=cpu": "", "rollout_apart=false": "nothing else is on the rollout's devices"}
    )
    """vllm, and sglang started here, on CUDA: release weights and KV cache while training."""
    engine_kwargs: dict[str, Any] = key({})
    """More options, with the last word: engine_kwargs.vllm.<option> (EngineArgs), engine_kwargs.sglang.<flag>."""

    @property
    def asks_servers(self) -> bool:
        """Whether generation is by servers, over HTTP."""
        return self.name in ("server", "sglang", "trtllm")

    @property
    def keeps_weights(self) -> bool:
        """Whether generation goes on with the weights that it has, whatever the policy learns."""
        return self.asks_servers and self.server.weight_updates == "none"

    @property
    def max_rows(self) -> int | None:
        """Upper bound on the rows of an old-log-prob micro-batch; None when tokens alone decide."""
        return None if self.log_prob_use_dynamic_bsz else self.log_prob_micro_batch_size_per_gpu
