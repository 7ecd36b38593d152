"""`reward`: how responses are scored."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from valor.config.base import PathStr, Section, Share, Strategy, also, inherits, key, section
from valor.config.engine import RewardModelFSDPConfig, RewardModelMegatronConfig

_GRADED = {"uses_graders": "the reward model scores every sample (reward_model.rule_weight=0)"}
_MODEL = {".judge.url=null": "the judge has its own server"}
_NO_FIELD = re.compile(r"(?<![\w{])\{(question|problem|instruction|query|answer|solution|reference\w*|gold\w*|truth)\}")
_SCORES = {".gives!=progress": "progress is beside the score, which stays the rule's"}


class CustomRewardFunctionConfig(Section):
    """A grader of the user's own: (data_source, solution_str, ground_truth, extra_info) -> score."""

    path: PathStr | None = None
    """Python file, or what valor.train wrote; null uses the built-in grader of each data source."""
    name: str = "compute_score"
    """Function in it."""
    reward_kwargs: dict[str, Any] = key({})
    """Further keyword arguments of the function."""


class RewardManagerConfig(Section):
    """Who calls the graders."""

    name: Annotated[Literal["naive", "prime", "dapo", "batch"], also(remote="naive")] = "naive"
    """naive, prime: sample by sample; dapo: and a penalty for length; batch: your function once a step."""


class JudgeConfig(Section):
    """A language model behind an OpenAI-compatible server that is asked what a response is worth."""

    url: str | None = None
    """Address up to the version, such as http://localhost:8000/v1; null asks no judge."""
    model: str | None = None
    """The model's name on that server."""
    prompt_template: str | None = None
    """What is asked, with {prompt}, {response}, {transcript}, {ground_truth} in it; null: for a score in the range."""
    score_range: tuple[float, float] = (0.0, 10.0)
    """Scores outside are failures."""
    request: dict[str, Any] = key({"temperature": 0.0, "max_tokens": 512})
    """Further fields of the chat completion request."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key, if the server wants one."""
    concurrency: PositiveInt = 32
    """Requests in flight."""
    timeout: PositiveFloat = 60.0
    """Seconds that one request may take."""
    retries: NonNegativeInt = 3
    """Further attempts after a refused or broken request, with growing pauses."""

    def contradictions(self, at: str) -> Iterator[str]:
        if self.url is None:
            return
        if self.model is None:
            yield f"{at}url needs {at}model: the model's name on that server"
        if self.prompt_template is not None and "{response}" not in self.prompt_template:
            yield f"{at}prompt_template has no {{response}} in it: the judge would not see it"
        if field := _NO_FIELD.search(self.prompt_template or ""):
            fields = "{prompt}, {response}, {transcript} and {ground_truth}"
            yield f"{at}prompt_template has {field[0]} in it, for which nothing is put in: its fields are {fields}"
        if self.score_range[0] >= self.score_range[1]:
            yield f"{at}score_range must be [low, high] with low below high"


class RewardModelConfig(Section):
    """A learned reward model, or a judge; it replaces the rule (in training) unless rule_weight says otherwise."""

    enable: bool = False
    """Score with a reward model."""
    model_path: PathStr | None = None
    """Hugging Face hub id or directory of a sequence classifier (one label), a token classifier, a published critic."""
    gives: Literal["outcome", "steps", "progress"] = key("outcome", _MODEL)
    """A score; of a token classifier one at the end of each step; of a critic what each step has added to the value."""
    step_separator: str | None = key(None, ".gives!=outcome")
    """Text with which a step ends, such as a blank line; null: every token is a step."""
    tokenizer_path: PathStr | None = inherits(".model_path", _MODEL)
    """Its tokenizer, if that is not beside the model."""
    custom_chat_template: str | None = key(None, _MODEL)
    """Chat template in place of its tokenizer's: Jinja text, or a file with it."""
    trust_remote_code: bool = key(False, _MODEL)
    """Run Python code that the model directory brings along."""
    label: int | None = key(None, _MODEL)
    """Of a classifier of several labels: the one whose log-odds (of a token classifier: probability) are the score."""
    weight: float = 1.0
    """Weight of the model's score in the reward, of progress in the advantage."""
    rule_weight: float = key(0.0, _SCORES)
    """Weight of the rule's score in the reward; 0 grades no training sample by rule."""
    max_length: PositiveInt | None = key(None, _MODEL)
    """Most tokens of a text, the beginning of longer ones is cut; null takes what model and tokenizer name."""
    micro_batch_size_per_gpu: PositiveInt | None = key(None, _MODEL)
    """Most texts in a forward micro-batch of one process; null leaves it to the token budget."""
    max_token_len_per_gpu: PositiveInt = key(16384, _MODEL)
    """Most tokens (padding included) in a forward micro-batch of one process."""
    strategy: Strategy = key("fsdp2", _MODEL)
    """Engine: fsdp2 or megatron."""
    fsdp_config: RewardModelFSDPConfig = section(RewardModelFSDPConfig, _MODEL)
    megatron: RewardModelMegatronConfig = section(RewardModelMegatronConfig)
    judge: JudgeConfig = section(JudgeConfig, ".judge.url")
    enable_resource_pool: bool = False
    """Give it devices of its own."""
    n_gpus_per_node: PositiveInt | None = key(None, ".enable_resource_pool")
    """Devices per node of that pool."""
    nnodes: NonNegativeInt = key(0, ".enable_resource_pool")
    """Nodes of that pool."""

    def contradictions(self, at: str) -> Iterator[str]:
        if (self.model_path is None) == (self.judge.url is None):
            mistake = "has neither" if self.model_path is None else "has both"
            yield f"{at}enable=true {mistake} {at}model_path and {at}judge.url: set one of them"
        if self.gives != "outcome" and self.judge.url is not None:
            yield f"{at}gives={self.gives} is read from a model's tokens, and a judge has none: set {at}model_path"
        if self.step_separator == "":
            yield f"{at}step_separator is empty: give a text such as a line break, or null for every token"
        if self.weight == 0:
            yield f"{at}weight=0 leaves the reward model without effect: set {at}enable=false"

    @property
    def is_role(self) -> bool:
        """Whether the run hosts a model (a judge has a server of its own)."""
        return self.enable and self.judge.url is None

    @property
    def replaces_rule(self) -> bool:
        """Whether training samples are scored without a grader."""
        return self.scores and self.rule_weight == 0

    @property
    def scores(self) -> bool:
        """Whether the reward is a model's or a judge's, in whole or in part."""
        return self.enable and self.gives != "progress"


class OverlongBufferConfig(Section):
    """DAPO's soft penalty for length."""

    enable: bool = False
    """Penalise training responses that end within the buffer or at the limit (needs reward_manager.name=dapo)."""
    len: PositiveInt = 4096
    """Tokens before the limit from which the penalty grows, from 0 to penalty_factor."""
    penalty_factor: PositiveFloat = 1.0
    """Penalty at the limit."""


class RewardKwargsConfig(Section):
    """Options of reward managers."""

    overlong_buffer_cfg: OverlongBufferConfig = section(OverlongBufferConfig, ".overlong_buffer_cfg.enable")


class RewardConfig(Section):
    """Scoring."""

    num_workers: PositiveInt | None = key(None, _GRADED)
    """Grader processes; null takes 8, and up to 64 while graders wait rather than compute (Linux)."""
    timeout: PositiveFloat = key(10.0, _GRADED)
    """Seconds that one sample may take."""
    memory_limit_mb: PositiveInt | None = key(4096, _GRADED)
    """Megabytes of data that one grader process may hold (Linux); null sets no limit."""
    error_score: float = 0.0
    """Score of a sample whose grader failed or ran out of time (the failure is recorded)."""
    max_error_ratio: Share = 0.5
    """Stop before a step, and save, when a larger share of its samples could not be graded; 1 never stops."""
    custom_reward_function: CustomRewardFunctionConfig = section(CustomRewardFunctionConfig, _GRADED)
    reward_manager: RewardManagerConfig = section(RewardManagerConfig)
    reward_kwargs: RewardKwargsConfig = section(RewardKwargsConfig)
    reward_model: RewardModelConfig = section(RewardModelConfig, ".reward_model.enable")

    def contradictions(self, at: str) -> Iterator[str]:
        manager = self.reward_manager.name
        named = f"{at}reward_manager.name={manager}"
        if manager == "batch" and self.custom_reward_function.path is None:
            yield f"{named} calls a function of your own: set {at}custom_reward_function.path"
        if self.reward_kwargs.overlong_buffer_cfg.enable and manager != "dapo":
            key = f"{at}reward_kwargs.overlong_buffer_cfg.enable"
            yield f"{key}=true is read with {at}reward_manager.name=dapo, it is {manager}: set that too"
