"""The embedded task: two-digit addition for a tiny model, with a teacher who often forgets the carry.

A problem is `58+77=`, a worked answer `15 1 13 135`: the sum of the units, the carry, the sum of the tens with it, the
result. The demonstrations for the warm start come from a teacher who, in most sums that have a carry, forgets it
(`15 0 12 125`). A policy that imitates him is wrong about half of the time although it has seen the right way; which
of the two pays is for reinforcement learning to find out. The mistake is made at one token, so a good critic's values
part there. Everything is a function of a seed; nothing is downloaded.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from valor.config.command_line import written
from valor.data.files import write_parquet

DATA_SOURCE = "valor/arithmetic"
PROBLEMS, TEACHER = "arithmetic problems", "often forgets the carry"
ANSWERS = "58+77= is answered by 15 1 13 135: the sum of the units, the carry, the sum of the tens with it, the result."
"""How `valor demo` and its report speak of the task."""

# Three sums of four have a carry from the units to the tens; among random pairs it would be fewer than half.
CARRY_SHARE = 0.75
# In how many of those the teacher forgets it: the mistake is the likelier answer, the right one is still often seen.
FORGET_SHARE = 0.6

_ROLES = ("system", "user", "assistant", "tool")
_SPECIAL = ("<|pad|>", "<|end|>", *(f"<|{role}|>" for role in _ROLES))
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class DataFiles:
    """Parquet files of the task. No problem of `val` occurs in any other file; `sft_*` hold the teacher's answers."""

    config_prefix: ClassVar[str] = ""
    """How the names of the task's settings in demo_config/ begin."""
    measured: ClassVar[str] = "accuracy on {} unseen problems, greedy"
    """What validation measures, on so many rows."""

    train: Path
    val: Path
    sft_train: Path
    sft_val: Path

    @classmethod
    def of(cls, folder: Path | str, **more: Any) -> Self:
        """The files in `folder`; `more`: the other fields."""
        return cls(*(Path(folder) / f"{name}.parquet" for name in ("train", "val", "sft_train", "sft_val")), **more)

    @property
    def settings(self) -> list[str]:
        """The files of an RL run, as settings of `valor ppo`."""
        return [f"data.train_files={written(str(self.train))}", f"data.val_files={written(str(self.val))}"]


def make_model(out_dir: Path | str, seed: int = 0, tokenizer: Any = None, initializer_range: float = 0.02) -> Path:
    """Write an untrained Qwen2 model of 0.6 million parameters and its byte tokenizer (or the one that is given).

    `initializer_range`: standard deviation of the weights. Returns the directory.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from valor.models.hf import quiet_transformers

    out = Path(out_dir)
    tokenizer = make_tokenizer() if tokenizer is None else tokenizer
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=initializer_range,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    with quiet_transformers():
        model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def make_tokenizer() -> Any:
    """Qwen2's byte-level tokenizer without merges: a token per byte (per character of plain text), and a chat template.

    It reads any text. A tokenizer of another make would be turned into this kind by AutoTokenizer beside a Qwen2 model.
    """
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    tokens = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token=None,  # type: ignore[arg-type]  # every byte is a token, nothing is unknown
        additional_special_tokens=[f"<|{role}|>" for role in _ROLES],
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def make_data(
    out_dir: Path | str, seed: int = 0, *, num_val: int = 256, num_demonstrations: int = 16_000, num_sft_val: int = 256
) -> DataFiles:
    """Write training and validation problems (verl's columns) and the teacher's demonstrations (`messages`)."""
    rng = random.Random(seed)
    problems = make_problems(rng)
    if not 0 < num_val < len(problems):
        raise ValueError(f"num_val must be between 1 and {len(problems) - 1}, got {num_val}")
    val, train = problems[:num_val], problems[num_val:]
    files = DataFiles.of(out_dir)
    for path, some in ((files.train, train), (files.val, val)):
        questions = ((question(a, b), str(a + b), {"carry": has_carry(a, b)}) for a, b in some)
        write_prompts(path, DATA_SOURCE, "math", questions)
    write_demonstrations(files, num_demonstrations, num_sft_val, lambda: demonstration(rng, *rng.choice(train)))
    return files


def write_prompts(path: Path, source: str, ability: str, questions: Iterable[tuple[str, Any, dict[str, Any]]]) -> None:
    """Rows in verl's columns, of questions with their ground truths and what else is said of them."""
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": text}],
            "ability": ability,
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": path.stem, "index": i, **facts},
        }
        for i, (text, truth, facts) in enumerate(questions)
    ]
    write_parquet({path: rows})


def write_demonstrations(files: DataFiles, number: int, number_val: int, chat: Callable[[], list[dict]]) -> None:
    """So many chats of the teacher's, to learn from and to validate."""
    for path, count in ((files.sft_train, number), (files.sft_val, number_val)):
        write_parquet({path: [{"messages": chat()} for _ in range(count)]})


def make_problems(rng: random.Random) -> list[tuple[int, int]]:
    """All pairs of two-digit numbers with a carry from the units, and others as far as CARRY_SHARE allows; shuffled."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    carrying = [p for p in pairs if has_carry(*p)]
    others = [p for p in pairs if not has_carry(*p)]
    problems = carrying + rng.sample(others, round(len(carrying) * (1 / CARRY_SHARE - 1)))
    rng.shuffle(problems)
    return problems


def has_carry(a: int, b: int) -> bool:
    return a % 10 + b % 10 >= 10


def question(a: int, b: int) -> str:
    return f"{a}+{b}="


def worked_answer(a: int, b: int, *, forget_carry: bool = False) -> str:
    """Sum of the units, carry, sum of the tens, result: `15 1 13 135` for 58 + 77, `15 0 12 125` if it is forgotten."""
    units = a % 10 + b % 10
    carry = 0 if forget_carry else units // 10
    tens = a // 10 + b // 10 + carry
    return f"{units:02d} {carry} {tens:02d} {tens * 10 + units % 10}"


def demonstration(rng: random.Random, a: int, b: int) -> list[dict[str, str]]:
    """One chat of the teacher's; he forgets a carry with probability FORGET_SHARE."""
    answer = worked_answer(a, b, forget_carry=rng.random() < FORGET_SHARE)
    return [{"role": "user", "content": question(a, b)}, {"role": "assistant", "content": answer}]
