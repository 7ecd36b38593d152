"""Episodes of several turns: `multi_turn` and `agent` of the rollout, and the search agent's keys at the root."""

from math import inf
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from valor.config.base import PathStr, Section, key, section

_AGENT = "actor_rollout_ref.rollout.agent"
_TURNS = f".enable or {_AGENT}.environment or {_AGENT}.default_agent_loop=environment_agent"


class MultiTurnConfig(Section):
    """Episodes in which the policy calls tools, in the chat format of its model."""

    enable: bool = False
    """Let the policy call tools, and go on with their results."""
    max_assistant_turns: PositiveInt | None = key(None, _TURNS)
    """Most turns of the policy in an episode; null: until data.max_response_length tokens."""
    max_user_turns: PositiveInt | None = key(None, _TURNS)
    """Most times that the policy is told something after the prompt; null sets no limit."""
    environment: str | None = key(None, ".enable")
    """Class whose public methods are the tools, as file.py:Class or package.module:Class; one object an episode."""
    tool_config_path: PathStr | None = key(None, ".enable")
    """YAML file that lists tools: class_name, config, tool_schema."""
    function_tool_path: PathStr | None = key(None, ".enable")
    """Python file whose functions with @function_tool are tools."""
    max_parallel_calls: PositiveInt = key(1, ".enable")
    """Most calls of one turn that are answered; further ones are told so."""
    max_tool_response_length: PositiveInt = key(256, ".enable")
    """Longest result of a tool in characters; what is longer is cut."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = key("middle", ".enable")
    """Where a longer result is cut."""
    tool_timeout: PositiveFloat = key(30.0, _TURNS)
    """Seconds that one call of a tool, or of a text environment, may take."""
    format: str = key("hermes", ".enable or actor_rollout_ref.rollout.agent.default_agent_loop=gateway_agent")
    """How the policy writes a call: hermes, qwen3_coder, llama3_json, or one that was registered."""

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
    host: str = "127.0.0.1"
    """Address at which the server listens; programs on other machines need another one."""


class AgentConfig(Section):
    """Who carries an episode through its turns."""

    default_agent_loop: str | None = None
    """Loop of rows without agent_name; null: as environment, multi_turn.enable and do_search say, or one turn."""
    agent_loop_config_path: PathStr | None = None
    """YAML file that lists loops of your own: name, _target_, and arguments of the class."""
    environment: str | None = None
    """What answers: skyrl_gym:ID, textarena:GAME, reasoning_gym:TASK, openenv:URL, or your own, file.py:Class."""
    environment_kwargs: dict[str, Any] = key({}, ".environment")
    """Arguments of the environment. A row's extra_info may name others, and another environment."""
    gateway: GatewayConfig = section(GatewayConfig)
    max_concurrent_episodes: PositiveInt = 512
    """Most episodes under way at once in one process."""
    deterministic: bool = False
    """Wait after every turn for all episodes, so that a run repeats bit for bit whatever the tools' speed."""
    replay_dir: PathStr | None = key(None, "plays_episodes")
    """Train on the episodes that a run has recorded here (trainer.episode_data_dir), and generate nothing."""


class RetrieverConfig(Section):
    """Where searches go."""

    url: str | None = key("http://127.0.0.1:8000/retrieve", "do_search")
    """Address of a retrieval server (valor retrieve); null: searched in the rollout's process, in corpus_path."""
    corpus_path: PathStr | None = key(None, "do_search")
    """url=null: jsonl or parquet file of documents."""
    topk: PositiveInt = key(3, "do_search")
    """Documents for a query."""
    timeout: PositiveFloat = key(30.0, "do_search")
    """Seconds that a search may take."""


class StateMaskingConfig(Section):
    """Search-R1's marks around what the policy was told."""

    start_state_marker: str = key("<information>", "do_search")
    """Before the documents."""
    end_state_marker: str = key("</information>", "do_search")
    """After them."""
