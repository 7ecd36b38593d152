"""`data`: prompt files, lengths and batch sizes."""

from typing import Any, Literal

from pydantic import PositiveInt

from valor.config.base import PathList, PathStr, Section, Seed, inherits, key, section

Truncation = Literal["error", "left", "right", "middle"]


class FilesConfig(Section):
    """Where the rows to train on are."""

    train_files: PathList = key(["~/data/gsm8k/train.parquet"])
    """Training rows (prompts, demonstrations or preference pairs): one parquet or jsonl file, or a list."""
    val_files: PathList | None = None
    """Validation rows; null runs no validation (reward models: holds out val_share of the training rows)."""
    train_max_samples: int = -1
    """Use only this many training rows; -1 all."""
    val_max_samples: int = -1
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
    """Python file; null reads parquet and jsonl files. Its items are rows as those files have them."""
    name: str = key("Dataset", ".path")
    """Class in it."""


class DataConfig(FilesConfig):
    """Prompts: where they are, how they are read, how many go into a step."""

    custom_cls: CustomClsConfig = section(CustomClsConfig)
    reward_fn_key: str = "data_source"
    """Column by which a grader is chosen."""
    image_key: str | None = None
    """Column with a prompt's images, one for each <image> in its messages; null: prompts are text."""
    image_cache: PathStr = key("~/.cache/valor/images", ".image_key")
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
