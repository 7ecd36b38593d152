"""Training from Python: `valor.train(...)`, `valor.PPO`, `valor.SFT`, `valor.RewardModel`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from valor.config import PPOConfig, RMConfig, SFTConfig
from valor.errors import UserError
from valor.lab.given import demonstration_row, given_bytes, prompt_row
from valor.lab.python_run import PythonRun
from valor.rewards.functions import RewardFunctions, pickled
from valor.trainer.main_ppo import ppo_run
from valor.trainer.main_sft import rm_run, sft_run

Reward = Callable[..., Any] | Sequence[Callable[..., Any]]


class PPO(PythonRun):
    """PPO with a critic, GRPO and their relatives.

    reward: a function that takes (data_source, solution_str, ground_truth, extra_info) or (completions, **columns), or
    several, whose scores are added with `reward_weights`; without one the built-in graders go by the rows' data_source.
    algorithm: the name of an advantage estimator. critic: where the critic starts, as `model`; default: there too.
    """

    words, root, _make = "ppo", PPOConfig, staticmethod(ppo_run)
    model_key = "actor_rollout_ref.model"

    def __init__(
        self,
        model: Any = None,
        train_data: Any = None,
        *,
        reward: Reward | Mapping[str, Any] | None = None,
        reward_weights: Sequence[float] | None = None,
        algorithm: str | Mapping[str, Any] | None = None,
        critic: Any = None,
        **arguments: Any,
    ) -> None:
        sections = {"reward": reward, "algorithm": algorithm, "critic": critic}
        arguments |= {name: one for name, one in sections.items() if isinstance(one, Mapping)}
        self._functions: RewardFunctions | None = None
        if reward is not None and not isinstance(reward, Mapping):
            functions = [*reward] if isinstance(reward, list | tuple) else [cast(Any, reward)]
            self._functions = RewardFunctions(functions, reward_weights)
        elif reward_weights is not None:
            raise UserError("reward_weights are those of reward functions: give reward=[...]")
        if isinstance(algorithm, str):
            arguments["algorithm.adv_estimator"] = algorithm
        self._critic = None if isinstance(critic, Mapping) else critic
        super().__init__(model, train_data, **arguments)
        self._check_travels()

    @property
    def policy(self) -> Any:
        """The policy's present weights, a transformers model."""
        return self._loaded("actor", "AutoModelForCausalLM")

    @property
    def critic(self) -> Any:
        """The critic's present weights: a token classifier whose logits are the values of what was read so far."""
        return self._loaded("critic", "AutoModelForTokenClassification")

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        return prompt_row(row, keep_prompt=self._functions is not None and self._functions.reads_prompts)

    def _give_more(self) -> None:
        self._give_model("critic.model", self._critic)
        if self._functions is not None:
            self._files["reward.custom_reward_function.path"] = given_bytes("reward", ".pkl", pickled(self._functions))

    def _check_travels(self) -> None:
        """UserError: processes of their own would not have something that was registered in this one."""
        from valor.algorithms import POLICY_LOSSES, VALUE_LOSSES
        from valor.controller.placement import resolve_placement

        config = self.config
        if config.trainer.node_rank is not None:
            raise UserError("trainer.node_rank is for the command line: from Python join a Ray cluster that runs")
        if config.algorithm.custom_path is not None or resolve_placement(config).controller == "local":
            return
        names = {config.policy_loss: POLICY_LOSSES, config.critic.value_loss: VALUE_LOSSES}
        for name, registry in names.items():
            if not registry[name].builtin:
                raise UserError(
                    f"the loss '{name}' was registered in this process, and under Ray others train: put it into a file "
                    "and set algorithm.custom_path, or set trainer.controller=local"
                )


class SFT(PythonRun):
    """Supervised fine-tuning: rows with `messages`, or with a `prompt` and a `response` (or `completion`)."""

    words, root, _make = "sft", SFTConfig, staticmethod(sft_run)
    policy = PPO.policy

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        return demonstration_row(row)


class RewardModel(PythonRun):
    """A reward model from preference pairs: rows with `prompt`, `chosen` and `rejected`."""

    words, root, _make = "rm train", RMConfig, staticmethod(rm_run)

    @property
    def reward_model(self) -> Any:
        """Its present weights: a sequence classifier of one label."""
        return self._loaded("reward_model", "AutoModelForSequenceClassification")


def train(model: Any = None, train_data: Any = None, *, algorithm: Any = "gae", **arguments: Any) -> PythonRun:
    """Train, and return the run. `algorithm`: an advantage estimator (`gae` is PPO with a critic; `grpo`, `rloo`, …),
    `sft` or `reward_model`; the other arguments are those of PPO, SFT or RewardModel."""
    if algorithm in ("sft", "reward_model"):
        return (SFT if algorithm == "sft" else RewardModel)(model, train_data, **arguments).train()
    return PPO(model, train_data, algorithm=algorithm, **arguments).train()
