"""`actor_rollout_ref.rollout`: how responses are generated, in one turn or in episodes; and the search agent's keys."""

from collections.abc import Iterator
from math import inf
from typing import Annotated, Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from valor.config.base import (
    CountOrOff,
    DType,
    FolderStr,
    PathStr,
    PositiveShare,
    Section,
    Share,
    also,
    follows,
    inherits,
    key,
    section,
)

_AGENT = "actor_rollout_ref.rollout.agent"
_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn.enable"
_ENV = f"data.taskset or {_AGENT}.environment"
_TURNS = f".enable or {_ENV} or {_AGENT}.default_agent_loop=environment_agent"
_EPISODES = {"plays_episodes": "answers have one turn here"}
_PLAYED = {f"{_AGENT}.replay_dir=null": "recorded episodes are replayed"}


_SAMPLED = {".effective_temperature": "answers are greedy"}


class ValidationSamplingConfig(Section):
    """Sampling during validation."""

    n: PositiveInt = key(1, {".repeats=false": "greedy answers to a prompt are all alike: set val_kwargs.temperature"})
    """Responses per validation prompt (mean@n, pass@k and maj@n need more than one)."""
    temperature: NonNegativeFloat = key(0.0, ".do_sample!=false")
    """Softmax temperature; 0 is greedy."""
    top_k: CountOrOff = key(-1, _SAMPLED)
    """Sample among the k likeliest tokens; -1 among all."""
    top_p: PositiveShare = key(1.0, _SAMPLED)
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

    @property
    def repeats(self) -> bool:
        """Whether a prompt gets the same answer several times."""
        return self.n > 1 and self.effective_temperature == 0


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

    base_url: list[str] = key([])
    """Address of a server that is running, such as http://localhost:8000/v1, or a list; sglang: [] starts some."""
    model: str = inherits("actor_rollout_ref.model.path")
    """The model's name on the server."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key, if the server wants one."""
    weight_updates: Literal["filesystem", "none"] = "filesystem"
    """filesystem: vLLM and SGLang read new weights from files; none: servers keep their own weights."""
    weights_dir: PathStr | None = key(None, ".weight_updates=filesystem")
    """Folder of these files, on a path that this machine and the server's share; null: the temporary directory."""
    timeout: PositiveFloat = 600.0
    """Seconds for a response, a weight update or a start, and for which the last server may be unreachable."""
    sleep: bool = key(False, {"actor_rollout_ref.rollout.name=sglang": "only SGLang's servers are put to sleep"})
    """sglang: servers at base_url are on the trainer's devices: they release their memory while it trains."""
    log_dir: FolderStr = follows("trainer.default_local_dir")


class MultiTurnConfig(Section):
    """Episodes in which the policy calls tools, in the chat format of its model."""

    enable: bool = False
    """Let the policy call tools, and go on with their results."""
    max_assistant_turns: PositiveInt | None = key(None, _TURNS)
    """Most turns of the policy in an episode; null: until data.max_response_length tokens."""
    max_user_turns: PositiveInt | None = key(None, _TURNS)
    """Most times that the policy is told something after the prompt; null sets no limit."""
    tool_config_path: PathStr | None = key(None, {".enable": "", **_PLAYED})
    """YAML file that lists tools: class_name, config, tool_schema."""
    function_tool_path: PathStr | None = key(None, {".enable": "", **_PLAYED})
    """Python file whose functions with @function_tool are tools."""
    max_parallel_calls: PositiveInt = key(1, f".enable or {_ENV}")
    """Most calls of one turn that are answered; further ones are told so."""
    max_tool_response_length: PositiveInt = key(256, f".enable or {_ENV}")
    """Longest result of a tool in characters; what is longer is cut."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = key("middle", f".enable or {_ENV}")
    """Where a longer result is cut."""
    tool_timeout: PositiveFloat = key(30.0, f"{_TURNS} or do_search")
    """Seconds that one call of a tool or of an environment may take, or one request of a search (do_search)."""
    max_tool_error_ratio: Share = key(1.0, f".enable or {_ENV} or do_search")
    """Stop when tools fail in more than this share of a step's calls, the policy's mistakes left out; 1 never does."""
    format: str = key("auto", f".enable or {_ENV} or {_AGENT}.default_agent_loop=gateway_agent")
    """How the policy writes a call: auto (as the chat template), hermes, or another format."""

    @property
    def most_turns(self) -> float:
        """Most turns of the policy in an episode: by their own number, and by how often it is told something."""
        by_told = inf if self.max_user_turns is None else self.max_user_turns + 1
        return min(self.max_assistant_turns or inf, by_told)


class GatewayConfig(Section):
    """agent_name=gateway_agent: episodes played by programs that call an OpenAI-compatible server."""

    function: str | None = None
    """Function that plays one episode, as file.py:name: called with base_url, api_key and row; may return a reward."""
    command: str | None = None
    """Or a shell command, with OPENAI_BASE_URL and OPENAI_API_KEY; the row is its input, a last line its reward."""
    timeout: PositiveFloat = 600.0
    """Seconds that an episode may take."""


class CompactionConfig(Section):
    """Where a row has no room for a further turn the policy writes a summary, and goes on from that in a new row."""

    enable: bool = key(False, _TURNS.replace(".enable", _MULTI_TURN, 1))
    """Cut rows in loops of tools and of text environments."""
    turn_length: PositiveInt = key(256, ".enable")
    """Tokens that a turn must have left; with less the policy is asked for a summary."""
    summary_length: PositiveInt = key(256, ".enable")
    """Longest summary in tokens, which turns leave free."""
    max_compactions: PositiveInt = key(8, ".enable")
    """Most summaries of an episode; its last row goes on to the limits as without them."""
    request: str = key(
        "There is no room for a longer conversation. Write down what you need to go on: what you know, what you have "
        "done, and what is left to do. You will read your notes after the first message, and nothing else.",
        ".enable",
    )
    """What the policy is asked then."""
    summary: str = key("Your notes of the conversation so far: {summary}", ".enable")
    """How it reads its summary, at the end of the first message."""

    def contradictions(self, at: str) -> Iterator[str]:
        if "{summary}" not in self.summary:
            yield f"{at}summary has no {{summary}}, so the policy would not read what it has written: add it"


class AgentConfig(Section):
    """Who carries an episode through its turns."""

    default_agent_loop: str | None = None
    """Loop of rows without agent_name; null: as environment, multi_turn.enable and do_search say, or one turn."""
    agent_loop_config_path: PathStr | None = key(None, _PLAYED)
    """YAML file that lists loops of your own: name, _target_, and arguments of the class."""
    environment: str | None = None
    """Class, as file.py:Class: an Env, or one whose public methods are tools."""
    environment_kwargs: dict[str, Any] = key({}, ".environment")
    """Arguments of the class."""
    compaction: CompactionConfig = section(CompactionConfig)
    gateway: GatewayConfig = section(GatewayConfig, _EPISODES)
    max_concurrent_episodes: PositiveInt = key(512, _EPISODES)
    """Most episodes under way at once in one process."""
    deterministic: bool = key(False, _EPISODES)
    """Wait after every turn for all episodes, so that a run repeats bit for bit whatever the tools' speed."""
    replay_dir: PathStr | None = key(None, _EPISODES)
    """Train on the episodes that a run has recorded here (trainer.episode_data_dir), and generate nothing."""


class RetrieverConfig(Section):
    """Where searches go."""

    url: str | None = key("http://127.0.0.1:8000/retrieve", "do_search")
    """Address of a retrieval server (valor retrieve); null: searched in the rollout's process, in corpus_path."""
    corpus_path: PathStr | None = key(None, {"do_search": "", ".url=null": "the server at retriever.url is asked"})
    """File of documents: jsonl, json or parquet."""
    topk: PositiveInt = key(3, "do_search")
    """Documents for a query."""


class RolloutConfig(Section):
    """Generation."""

    name: Annotated[str, also(hf="native")] = "native"
    """Engine: native with the actor's own weights, or a copy; vllm with a copy; server, sglang, trtllm ask servers."""
    n: PositiveInt = 1
    """Responses (samples) per prompt."""
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
    """Old and reference log-probs: most samples in a micro-batch of one process; null leaves it to the token budget."""
    log_prob_max_token_len_per_gpu: PositiveInt = inherits("actor_rollout_ref.actor.ppo_max_token_len_per_gpu")
    """Old and reference log-probs: most tokens (padding included) in a micro-batch of one process."""
    log_prob_use_dynamic_bsz: bool = follows("actor_rollout_ref.actor.use_dynamic_bsz")
    val_kwargs: ValidationSamplingConfig = section(ValidationSamplingConfig, "data.val_files or data.val_tasks")
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
