"""`data`: prompt files, lengths and batch sizes."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from valor.config.base import FolderStr, PathList, PathStr, Section, Seed, Share, inherits, key, section

Truncation = Literal["error", "left", "right", "middle"]


class FilesConfig(Section):
    """Where the rows to train on are."""

    train_files: PathList = key(["~/data/gsm8k/train.parquet"])
    """Training rows (prompts, demonstrations or preference pairs): one file (parquet, jsonl, json), or a list."""
    val_files: PathList | None = None
    """Validation rows; null runs no validation (reward models: holds out val_share of the training rows)."""
    train_max_samples: int = -1
    """Use only this many training rows; -1 all."""
    val_max_samples: int = key(-1, "data.val_files or data.val_share")
    """Use only this many validation rows; -1 all."""
    prompt_key: str = "prompt"
    """Column with the prompt: chat messages (supervised runs: or text)."""
    apply_chat_template_kwargs: dict[str, Any] = key({})
    """Extra arguments of the tokenizer's chat template, such as enable_thinking."""
    shuffle: bool = True
    """Draw training rows in random order, anew in each epoch."""


class CustomClsConfig(Section):
    """A dataset class of the user's own: (data_files, tokenizer, processor, config, max_samples) -> prompts."""

    path: PathStr | None = None
    """Python file; null reads the files themselves. Its items are rows as those files have them."""
    name: str = key("Dataset", ".path")
    """Class in it."""


class DifficultyConfig(Section):
    """Rows by how often their answers were right lately, in place of each row once an epoch.

    A row that is answered again has the mean of its earlier pass rate and the new one.
    """

    enable: bool = False
    """Draw rows with probabilities in the ratio of their pools' weights."""
    thresholds: list[Share] = key([0.1, 0.9], ".enable")
    """Pass rates, ascending, that divide the rows into pools."""
    weights: list[PositiveFloat] = key([0.2, 1.0, 0.2], ".enable")
    """Weight of a row in each pool, from the hardest to the easiest."""
    new_weight: PositiveFloat = key(1.0, ".enable")
    """Weight of a row that has not been answered yet."""
    predictor: Literal["none", "critic"] = key("none", ".enable")
    """critic: pass rates of rows without answers are the critic's values of their prompts (rewards from 0 to 1)."""

    def contradictions(self, at: str) -> Iterator[str]:
        if sorted(set(self.thresholds)) != self.thresholds:
            yield f"{at}thresholds={self.thresholds} must ascend"
        if len(self.weights) != len(self.thresholds) + 1:
            pools = f"{len(self.thresholds)} thresholds make {len(self.thresholds) + 1} pools"
            yield f"{at}weights={self.weights}: {pools}, each with a weight"


class PromptSamplerConfig(Section):
    """Which rows come next: with all keys at their defaults each row once an epoch, by data.shuffle and data.seed."""

    class_path: PathStr | None = None
    """Python file, or module, with a sampler of your own."""
    class_name: str | None = key(None, ".class_path")
    """Class in it, called as class_name(data_source=..., data_config=...); its items are numbers of rows."""
    difficulty: DifficultyConfig = section(DifficultyConfig)

    def contradictions(self, at: str) -> Iterator[str]:
        if self.class_path is not None and self.class_name is None:
            yield f"{at}class_path={self.class_path} needs {at}class_name, a class in it"
        if self.class_path is not None and self.difficulty.enable:
            yield f"{at}class_path and {at}difficulty.enable are two samplers: drop one"


_FROM_FILES = {"data.taskset=null": "a task set brings its prompts"}


class DataConfig(
    FilesConfig,
    train_files=key(["~/data/gsm8k/train.parquet"], _FROM_FILES),
    val_files=key(None, _FROM_FILES),
    train_max_samples=key(-1, _FROM_FILES),
):
    """Prompts: where they are, how they are read, how many go into a step."""

    taskset: str | None = None
    """Tasks with prompts, tools and reward: file.py:Class, an environment with rows()."""
    taskset_kwargs: dict[str, Any] = key({}, ".taskset")
    """Arguments of its rows()."""
    val_tasks: NonNegativeInt = key(0, ".taskset")
    """Hold out so many tasks at its end for validation."""

    custom_cls: CustomClsConfig = section(CustomClsConfig)
    sampler: PromptSamplerConfig = section(PromptSamplerConfig)
    reward_fn_key: str = "data_source"
    """Column by which a grader is chosen."""
    image_key: str | None = None
    """Column with a prompt's images, one for each <image> in its messages; null: prompts are text."""
    image_cache: FolderStr = key("~/.cache/valor/images", ".image_key")
    """Folder for images as the model reads them, on a path that all processes share."""
    mm_processor_kwargs: dict[str, Any] = key({}, ".image_key")
    """Options of the model's processor, such as min_pixels and max_pixels."""
    max_prompt_length: PositiveInt = 512
    """Longest prompt in tokens."""
    max_response_length: PositiveInt = 512
    """Longest response in tokens."""
    max_start_length: PositiveInt | None = key(None, "do_search")
    """Longest first prompt of a search episode in tokens; null takes max_prompt_length."""
    max_obs_length: PositiveInt = key(512, "do_search")
    """Longest search result in tokens; what is longer is cut."""
    train_batch_size: PositiveInt = 1024
    """PROMPTS per training step."""
    gen_batch_size: PositiveInt | None = key(None, "algorithm.filter_groups.enable")
    """Prompts generated at once by dynamic sampling; null takes train_batch_size."""
    seed: Seed = inherits("trainer.seed")
    """Seed of the order of rows, and of those that *_max_samples draw."""
    filter_overlong_prompts: bool = False
    """Leave out prompts longer than max_prompt_length."""
    truncation: Truncation = "error"
    """What happens to a prompt that is too long and was not filtered: stop, or cut that part."""

    @property
    def has_validation(self) -> bool:
        """Whether there are validation prompts."""
        return bool(self.val_tasks if self.taskset is not None else self.val_files)

    def contradictions(self, at: str) -> Iterator[str]:
        if self.taskset is not None and self.custom_cls.path is not None:
            yield f"{at}taskset and {at}custom_cls.path both bring the prompts: drop one"
        if self.sampler.difficulty.enable and not self.shuffle:
            yield f"{at}shuffle=false keeps rows in order, and {at}sampler.difficulty draws them: drop one"
