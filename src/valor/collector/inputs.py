"""Everything a run reads before it starts: tokenizer, prompts, graders. Bad input is found here, nothing is written."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Literal

from valor.agents.agents import Agents
from valor.agents.chat import format_of
from valor.agents.episode import with_text
from valor.agents.formats import FORMATS, ToolCall
from valor.agents.loops import LOOPS
from valor.agents.taskset import taskset_of_run
from valor.agents.tools import name_of
from valor.config import DataConfig, PPOConfig, RewardModelConfig
from valor.config.engine import BackboneConfig
from valor.config.ppo import SINGLE_TURN
from valor.data.batch import Batch
from valor.data.curriculum import training_sampler
from valor.data.images import ImageFiles
from valor.data.plain_rows import TRUTHS
from valor.data.positions import num_positions, rope_limit
from valor.data.prompts import PromptDataset, PromptRow
from valor.data.reward_texts import CriticTexts, RewardTexts, longest_text
from valor.data.templates import ask_template, end_tokens, keeps, parts_of, written_call
from valor.errors import UserError, did_you_mean
from valor.models.images import FAMILIES
from valor.models.load import load_image_files, load_model_config, load_policy_tokenizer, load_tokenizer
from valor.models.reward import reward_model_kind
from valor.rewards.judge import Judge
from valor.rewards.manager import make_graders
from valor.rewards.registry import find_grader, needs_truth
from valor.tracking.console import say
from valor.workers.teacher import teacher_model

logger = logging.getLogger(__name__)


class RunInputs:
    """Tokenizer, data sets, sampler and graders of a run."""

    def __init__(self, config: PPOConfig) -> None:
        data = config.data.model_copy(update={"max_prompt_length": config.start_length})
        self._config = config
        self.tokenizer = load_policy_tokenizer(config)
        self._images = load_images(config, self.tokenizer) if data.image_key is not None else None
        self.agents = Agents(config, self.tokenizer, self._images) if config.plays_episodes else None
        self._data = data
        self._tools_of = None if self.agents is None else self.agents.schemas_of
        self.train = self._prompts(data, "train")
        self.val = self._prompts(data, "val") if data.has_validation else None
        answers = {"tool"} if self.agents and any(self.agents.schemas.values()) else set[str]()
        for loop, schemas in (self.agents.schemas if self.agents else {}).items():
            if schemas:
                say(f"{loop} has the tools {', '.join(map(name_of, schemas))}")
        splits = [rows for rows in (self.train, self.val) if rows is not None]
        parts = answers | parts_of(row.messages for rows in splits for row in rows)
        parts |= {"tools"} if answers or any(rows.has_tools for rows in splits) else set()
        row_arguments = {name for rows in splits for row in rows for name in row.template_kwargs}
        ask_template(
            self.tokenizer, parts, data.apply_chat_template_kwargs, needed=answers, row_arguments=row_arguments
        )
        if answers:
            _ask_format(self.tokenizer, config)
        dynamic = config.algorithm.filter_groups.enable
        at_once = data.gen_batch_size if dynamic and data.gen_batch_size else data.train_batch_size
        self.sampler = training_sampler(data, self.train, at_once)
        self.rewards = make_graders(config.reward)
        reward_model = config.reward.reward_model
        if not reward_model.replaces_rule:
            self._check_graded(self.train, sources=not config.distillation.alone)
        if self.val is not None:  # a reward model validates what has no grader
            self._check_graded(self.val, sources=not reward_model.enable)
        for rows in (self.train, self.val) if self.agents is None else ():
            _check_answered(rows or ())
        self._check_tokens(config)
        self.reward_texts = load_reward_texts(reward_model, self.tokenizer) if reward_model.is_role else None
        if isinstance(self.reward_texts, RewardTexts):
            first = self.train[0]
            options = [first.template_kwargs] if self.reward_texts.as_chat else None
            self.reward_texts.encode([first.messages], ["."], "the reward model reads a prompt", options)
        if "tools" in parts and self.reward_texts is not None and not _shows_tools(self.reward_texts.tokenizer):
            logger.warning("the reward model does not read the schemas of tools: its chat template leaves them out")
        self.judge = None
        if reward_model.enable and not reward_model.is_role:
            lacking = sum(row.ground_truth in (None, "") for row in self.train)
            if lacking and "{ground_truth}" in (reward_model.judge.prompt_template or ""):
                raise UserError(
                    "reward.reward_model.judge.prompt_template asks for {ground_truth}, which "
                    f"{lacking} of {len(self.train)} train prompts lack ({', '.join(TRUTHS)}): fill in, or leave out"
                )
            self.judge = Judge(reward_model.judge, config.reward.error_score)
            self.judge.check()
        # Under dynamic sampling a step may draw more prompts than this: epochs then are a measure of the run's length.
        steps_per_epoch = max(self.sampler.epoch_length // data.train_batch_size, 1)
        self.total_steps = config.trainer.total_training_steps or steps_per_epoch * config.trainer.total_epochs

    @property
    def eos_token_ids(self) -> list[int]:
        return end_tokens(self.tokenizer)

    @property
    def separator_id(self) -> int | None:
        """The token between the texts of a pair, for a reward model that reads pairs."""
        return self.reward_texts.separator_id if self.reward_texts is not None else None

    def validation_prompts(self, files: Sequence[str]) -> PromptDataset:
        """All prompts of files beside those of the run. UserError: a bad row, or one without a grader."""
        data = self._data.model_copy(update={"val_files": list(files), "val_max_samples": -1, "taskset": None})
        prompts = self._prompts(data, "val")
        self._check_graded(prompts)
        return prompts

    def _prompts(self, data: DataConfig, split: Literal["train", "val"]) -> PromptDataset:
        if data.taskset is None:
            return PromptDataset(data, self.tokenizer, split, self._tools_of, self._images)
        tasks, held_out = taskset_of_run(self._config).rows, data.val_tasks
        first = len(tasks) - held_out
        if first < 1:
            raise UserError(f"data.val_tasks={held_out} leaves none of the {len(tasks)} tasks to train on: lower it")
        data = data.model_copy(update={"train_max_samples": -1, "val_max_samples": -1})
        records = tasks[:first] if split == "train" else tasks[first:]
        return PromptDataset(data, self.tokenizer, split, self._tools_of, self._images, records)

    def with_text(self, batch: Batch) -> Batch:
        """The batch with `response_text`, decoded without special tokens, where the ranks have not done so."""
        return with_text(batch, self.decode)

    def decode(self, token_ids: Sequence[list[int]]) -> list[str]:
        """Responses as the graders read them."""
        return self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)

    def has_grader(self, data_source: str) -> bool:
        """Whether responses to prompts of this source can be graded by rule."""
        return self.rewards.grades_everything or find_grader(data_source) is not None

    def close(self) -> None:
        self.rewards.close()
        if self.judge is not None:
            self.judge.close()

    def _check_graded(self, rows: PromptDataset, *, sources: bool = True) -> None:
        """UserError: a row that no environment judges has a data source without a grader (`sources`), or no ground
        truth for a grader that needs one."""

        def judged(extra_info: Mapping[str, Any]) -> bool:
            return self.agents is not None and self.agents.judges(extra_info)

        if sources:
            self.rewards.check({row.data_source for row in rows if not judged(row.extra_info)})
        lacking = rows.without_truth
        if self.rewards.grades_everything:
            if len(lacking) == len(rows) and not judged(lacking[0].extra_info):
                near = next(filter(None, (did_you_mean(name, TRUTHS) for name in lacking[0].extra_info)), "")
                if near or self.rewards.reads_truth:
                    names = ", ".join(TRUTHS)
                    logger.warning(
                        "no %s prompt has a ground truth (%s): the reward gets None%s", rows.split, names, near
                    )
            lacking = []
            if (needed := self.rewards.needed_columns) and (absent := sorted(needed - rows.columns)):
                near = did_you_mean(absent[0], rows.columns)
                raise UserError(
                    f"the reward asks for '{absent[0]}', and no {rows.split} row has such a column (but "
                    f"{', '.join(sorted({*rows.columns, 'ground_truth'}))}): rename one of them{near}"
                )
        missing = [row for row in lacking if needs_truth(row.data_source) and not judged(row.extra_info)]
        if missing:
            raise UserError(
                f"{missing[0].where}: there is no reward_model.ground_truth, which the grader of "
                f"'{missing[0].data_source}' needs ({len(missing)} of {len(rows)} {rows.split} prompts): fill it in or "
                "leave such rows out"
            )

    def _check_tokens(self, config: PPOConfig) -> None:
        """UserError: the policy has too few positions for prompt and response, or an id of the tokenizer is beyond its
        vocabulary."""
        model = config.actor_rollout_ref.model
        size = int(check_positions(config).vocab_size)
        largest = max(self.eos_token_ids, default=0)
        if len(self.tokenizer) > size:
            largest = max(largest, *(max(row.prompt_ids) for row in [*self.train, *(self.val or ())]))
        if largest >= size:
            raise UserError(
                f"the tokenizer has token {largest} in a prompt or as its end, and the model '{model.path}' knows "
                f"{size} tokens: set actor_rollout_ref.model.tokenizer_path to the model's own"
            )


def _shows_tools(tokenizer: Any) -> bool:
    """Whether its chat template renders tools; a template that refuses the question does not."""
    with suppress(UserError):
        return keeps(tokenizer, "tools")
    return False


def _ask_format(tokenizer: Any, config: PPOConfig) -> None:
    """Warn of a chat template whose calls `multi_turn.format` does not read: then the policy's never are. Warn also of
    one that writes none."""
    name = config.actor_rollout_ref.rollout.multi_turn.format
    call = written_call(tokenizer, config.data.apply_chat_template_kwargs)
    if name == "auto":
        if call is None:
            read = f"rollout.multi_turn.format={format_of(tokenizer, None)}"
            logger.warning("the chat template writes no tool calls: they are read as %s", read)
    elif call is not None and not any(isinstance(one, ToolCall) for one in FORMATS[name](call, ()).calls):
        key, advice = f"rollout.multi_turn.format={name}", "take another format, or register one of your own"
        logger.warning(
            "%s does not read calls as the chat template writes them: %s: %s", key, " ".join(call.split()), advice
        )


def _check_answered(rows: Iterable[PromptRow]) -> None:
    """UserError: a row names an agent, or its prompt tells the policy to search, and no agent would answer."""
    if named := next((row for row in rows if row.extra_info.get("agent_name") not in (None, SINGLE_TURN)), None):
        name, agent = named.extra_info["agent_name"], "actor_rollout_ref.rollout.agent"
        loop_key = f"{agent}.default_agent_loop={name}" if name in LOOPS else f"{agent}.agent_loop_config_path"
        keys = {"tool_agent": "actor_rollout_ref.rollout.multi_turn.enable=true", "search_agent": "do_search=true"}
        raise UserError(
            f"data row {named.index} has agent_name '{name}', and by its keys this run has answers of one turn: set "
            f"{keys.get(name, loop_key)}, or leave the column out"
        )
    searching = next((row for row in rows if any("<search>" in str(m["content"]) for m in row.messages)), None)
    if searching is not None:
        raise UserError(
            f"data row {searching.index} tells the policy to write <search>…</search>, and nothing would answer: set "
            "do_search=true and retriever.url (valor retrieve CORPUS serves one), or take prompts without a search"
        )


def check_positions(config: PPOConfig) -> Any:
    """The policy's text config. UserError: it, the critic or a teacher has too few positions for prompt and
    response."""
    data, models, teach = config.data, list[BackboneConfig]([config.actor_rollout_ref.model]), config.distillation
    models += [config.critic.model] if config.has_value_model else []
    models += [teacher_model(config, teacher) for teacher in teach.models.values()] if teach.enabled else []
    text_configs = [load_model_config(model).get_text_config() for model in models]
    lengths = {"data.max_prompt_length + data.max_response_length": data.max_prompt_length + data.max_response_length}
    if config.plays_episodes or any(map(rope_limit, text_configs)):  # rows, or an engine's tables, may be that long
        lengths["actor_rollout_ref.rollout.max_model_len"] = config.actor_rollout_ref.rollout.max_model_len
    for model, text_config in zip(models, text_configs, strict=True):
        positions = num_positions(text_config)
        for key, longest in lengths.items():
            if positions is not None and longest > positions:
                original = " of its original rotary frequencies" if rope_limit(text_config) == positions else ""
                raise UserError(
                    f"{key} is {longest} tokens, and the model '{model.path}' has {positions} positions{original}: "
                    "set it lower, or take a model that reads longer texts"
                )
    return text_configs[0]


def load_images(config: PPOConfig, tokenizer: Any) -> ImageFiles:
    """What reads the images of prompts. UserError: policy or critic reads none, or Pillow is missing."""
    if find_spec("PIL") is None:
        raise UserError("data.image_key needs Pillow to read images: pip install 'valor-rl[images]'")
    data, files = config.data, load_image_files(config, tokenizer)
    if config.has_value_model and load_model_config(config.critic.model).model_type not in FAMILIES:
        raise UserError(
            f"data.image_key={data.image_key}: the critic '{config.critic.model.path}' reads no images: set "
            "critic.model.path to a model that does, such as the policy's"
        )
    return files


def load_reward_texts(model: RewardModelConfig, policy_tokenizer: Any) -> RewardTexts | CriticTexts:
    """How the reward model at `model.model_path` reads conversations. UserError: it cannot be one, or no tokenizer."""
    kind = reward_model_kind(model)
    assert model.tokenizer_path is not None, "it inherits model_path"
    tokenizer = load_tokenizer(
        model.tokenizer_path,
        trust_remote_code=model.trust_remote_code,
        custom_chat_template=model.custom_chat_template,
        require_chat_template=kind.reads_tokens,
    )
    longest = model.max_length or longest_text(tokenizer, kind.max_length)
    if not kind.reads_tokens:
        return RewardTexts(tokenizer, longest)
    texts = CriticTexts(tokenizer, policy_tokenizer, longest, reads_end=kind.head is not None)
    if not texts.agrees and (model.gives == "progress" or (model.gives == "steps" and model.step_separator is None)):
        raise UserError(
            f"'{model.model_path}' has another tokenizer or chat template than the policy, and by the policy's tokens "
            "only a model with the same ones can be read: take such a one, or gives=steps with a step_separator"
        )
    return texts
