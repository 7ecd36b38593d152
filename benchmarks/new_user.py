#!/usr/bin/env python3
"""The first afternoon of a new user, by commands alone: own data and reward, wrong inputs, runs, stop and resume.

    python benchmarks/new_user.py [--model DIR] [--only WORD] [--write PAGE]

60 rows of question and answer, a reward file, a tool file. `--model`: a Hugging Face directory for the runs, such as
SmolLM2-135M-Instruct; without it a model of 0.6 million parameters made on the spot. Every command is a process of its
own, as in a shell. Printed for each: what it shows, its exit code, its seconds, the line it was asked for. Exit code 1:
one failed. Run it before a release, on a machine with nothing else to do; `--only` takes the commands whose name has a
word in it.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from page import write_block

MOST = 30.0  # seconds within which a mistake is told
PLAIN = "algorithm=grpo actor_rollout_ref.model.path=tiny data.train_batch_size=8 data.max_prompt_length=128"
DATA, REWARD = "data.train_files=rows.jsonl", "reward.custom_reward_function.path=my_reward.py"
GOOD = f"ppo {PLAIN} data.max_response_length=8 {DATA} {REWARD}"
TOOL = "actor_rollout_ref.rollout.multi_turn"
HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
REWARDS = {
    "my_reward": HEAD + "    return float(ground_truth in solution_str)\n",
    "raises": HEAD + "    return 1 / 0\n",
    "none": HEAD + "    return None\n",
    "words": HEAD + "    return 'good'\n",
    "nan": HEAD + "    return float('nan')\n",
    "boolean": HEAD + "    return ground_truth in solution_str\n",
    "scalar": HEAD + "    import numpy\n    return numpy.float32(len(solution_str) % 3)\n",
    "broken": "def compute_score(:\n",
    "importing": "import no_such_module\n",
    "unnamed": "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n",
}
TOOLS = '''from valor.agents import function_tool


@function_tool
def stock(item: str) -> int:
    """Number of an item in the store.

    Args:
        item: Its name.
    """
    return {"pen": 12, "ink": 0}[item]
'''


@dataclass(frozen=True)
class Mistake:
    """A command that is wrong in one way, and what the answer has to say."""

    name: str
    command: str
    says: str
    code: int = 2


def with_reward(name: str, *more: str) -> str:
    return " ".join([GOOD.replace("my_reward.py", f"{name}.py"), "trainer.total_training_steps=1", *more])


MISTAKES = [
    Mistake("no model, no data", "ppo", "train.parquet"),
    Mistake("a model that is nowhere", GOOD.replace("path=tiny", "path=./nowhere"), "nowhere"),
    Mistake("a model without a tokenizer", GOOD.replace("path=tiny", "path=silent"), "tokenizer"),
    Mistake("an empty model folder", GOOD.replace("path=tiny", "path=hollow"), "hollow"),
    Mistake("a column with a typo", GOOD.replace("rows", "typo"), "qestion|question"),
    Mistake("an answer column with a typo", GOOD.replace("rows", "anwser") + " --dry-run", "mean answer", 0),
    Mistake("an empty file", GOOD.replace("rows", "empty"), "empty.jsonl"),
    Mistake("a file of text", GOOD.replace("rows.jsonl", "rows.txt"), "rows.txt"),
    Mistake("a row cut short", GOOD.replace("rows", "cut"), "cut.jsonl.*60"),
    Mistake("no grader for own rows", GOOD.replace(REWARD, ""), "custom_reward_function"),
    Mistake("a batch larger than the data", GOOD.replace("batch_size=8", "batch_size=1024"), "60 prompts"),
    Mistake("prompts that are too long", GOOD.replace("prompt_length=128", "prompt_length=4"), "max_prompt_length"),
    Mistake("a key with a typo", f"{GOOD} data.train_batchsize=8", "data.train_batch_size"),
    Mistake("an algorithm with a typo", GOOD.replace("=grpo", "=gpro"), "grpo"),
    Mistake("a word for a number", f"{GOOD} learning_rate=fast", "fast"),
    Mistake("a word of TRL's that is two keys", f"{GOOD} per_device_train_batch_size=4", "data.train_batch_size"),
    Mistake("a folder that cannot be written", f"{GOOD} output_dir=rows.jsonl/run --dry-run", "rows.jsonl"),
    Mistake("a file in place of the folder", f"{GOOD} output_dir=rows.jsonl", "rows.jsonl"),
    Mistake("a reward file that is nowhere", with_reward("nowhere"), "nowhere.py"),
    Mistake("a reward file with a slip", with_reward("broken"), "broken.py.*line 1|line 1"),
    Mistake("a reward that imports what is lacking", with_reward("importing"), "no_such_module"),
    Mistake("a reward of another name", with_reward("unnamed"), "compute_score"),
    Mistake("a tool file without tools", f"{GOOD} {TOOL}.enable=true {TOOL}.function_tool_path=my_reward.py", "tool"),
    Mistake("chat with a model that is nowhere", "chat ./nowhere", "nowhere"),
    Mistake("eval of a model that is nowhere", "eval ./nowhere data.val_files=rows.jsonl", "nowhere"),
    Mistake("a report of no run", "report nowhere", "nowhere"),
    Mistake("five mistakes at once",
            "ppo algorithm=gpro actor_rollout_ref.model.path=./nowhere data.train_files=no.jsonl learning_rate=fast "
            "data.train_batchsize=8 --dry-run", "(?s)(?=.*grpo)(?=.*nowhere)(?=.*no.jsonl)(?=.*fast)"),
]  # fmt: skip
ODD_REWARDS = [
    Mistake("a reward that raises", with_reward("raises", "output_dir=r1"), "raises.py.*ZeroDivisionError|division", 1),
    Mistake("a reward that returns None", with_reward("none", "output_dir=r2"), "None", 1),
    Mistake("a reward that returns words", with_reward("words", "output_dir=r3"), "good", 1),
    Mistake("a reward that is not a number", with_reward("nan", "output_dir=r4"), "nan", 1),
    Mistake("a reward that is a bool", with_reward("boolean", "output_dir=r5"), "report.html", 0),
    Mistake("a reward of numpy's", with_reward("scalar", "output_dir=r6"), "report.html", 0),
]


class Afternoon:
    def __init__(self, folder: Path, model: str, only: str) -> None:
        self.folder, self.model, self.only = folder, model, only
        self.rows: list[tuple[str, str, float, str, bool]] = []

    def prepare(self) -> None:
        """The user's files."""
        rows = [
            {"question": f"What is {a} + {b}? Answer with a number.", "answer": str(a + b)}
            for a in range(2, 12) for b in range(1, 7)
        ]  # fmt: skip
        texts = {"rows": rows, "typo": [{"qestion": r["question"], "answer": r["answer"]} for r in rows]}
        texts["anwser"] = [{"question": r["question"], "anwser": r["answer"]} for r in rows]
        for name, records in texts.items():
            (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (self.folder / "empty.jsonl").touch()
        (self.folder / "cut.jsonl").write_text((self.folder / "rows.jsonl").read_text()[:-12])
        (self.folder / "rows.txt").write_text("What is 1 + 1?\n")
        (self.folder / "rows.csv").write_text(
            "question,answer\n" + "".join(f"{r['question']},{r['answer']}\n" for r in rows)
        )
        for name, text in REWARDS.items():
            (self.folder / f"{name}.py").write_text(text)
        (self.folder / "tools.py").write_text(TOOLS)
        made = "from pathlib import Path; from valor.lab import arithmetic; arithmetic.make_model(Path('tiny'), seed=0)"
        subprocess.run([sys.executable, "-c", made], cwd=self.folder, check=True)
        kept = shutil.ignore_patterns("token*", "*.jinja")
        shutil.copytree(self.folder / "tiny", self.folder / "silent", ignore=kept)
        (self.folder / "hollow").mkdir()

    def run(self, name: str, command: str, says: str, code: int = 0, most: float = 1800.0, text: str = "") -> str:
        """A command of `valor` to its end: what it printed. Noted is the line with `says`."""
        if self.only not in name:
            return ""
        begin = time.monotonic()
        words = [sys.executable, "-m", "valor", *command.split()]
        done = subprocess.run(words, cwd=self.folder, input=text, capture_output=True, text=True)
        self.note(name, done.stdout + done.stderr, says, (done.returncode, code), (time.monotonic() - begin, most))
        return done.stdout + done.stderr

    def note(self, name: str, said: str, says: str, codes: tuple[int, int], seconds: tuple[float, float]) -> None:
        """One row: the line that was asked for, and whether line, exit code and seconds are as they should."""
        line = next((line for line in said.splitlines()[::-1] if re.search(says.replace("(?s)", ""), line)), "")
        there = re.search(says, said) is not None
        good = there and codes[0] == codes[1] and seconds[0] <= seconds[1] and "Traceback" not in said
        self.rows.append((name, str(codes[0]), seconds[0], line or said.strip().rpartition("\n")[2], good))
        print(
            f"{'ok  ' if good else 'FAIL'} {seconds[0]:6.1f} s  exit {codes[0]}  {name}: {self.rows[-1][3][:200]}",
            flush=True,
        )

    def stop_after(self, name: str, command: str, line: str) -> None:
        """Start it, press Ctrl-C at the first printed line with `line`, and wait for its end."""
        if self.only not in name:
            return
        begin, said = time.monotonic(), ""
        process = subprocess.Popen(
            [sys.executable, "-m", "valor", *command.split()],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        for printed in process.stdout:
            said += printed
            if re.search(line, printed) and line not in ("", None):
                process.send_signal(signal.SIGINT)
                line = "(?!)"
        self.note(
            name,
            said,
            "stopped after step .* the same command goes on",
            (process.wait(), 130),
            (time.monotonic() - begin, 1800.0),
        )

    def mistakes(self) -> None:
        for one in MISTAKES:
            self.run(one.name, one.command, one.says, one.code, MOST)
        for one in ODD_REWARDS:
            self.run(one.name, one.command, one.says, one.code)

    def runs(self) -> None:
        """The user's own task with the model: GRPO with LoRA, PPO stopped and resumed, a tool, eval, chat, report."""
        model, sizes = (
            f"actor_rollout_ref.model.path={self.model}",
            "data.max_prompt_length=128 data.max_response_length=16",
        )
        own = f"{model} {sizes} {DATA} {REWARD} data.train_batch_size=8 trainer.device=cpu"
        grpo = f"algorithm=grpo {own} num_generations=4 lora_rank=8 learning_rate=1e-4 trainer.total_training_steps=3"
        self.run("the plan of GRPO with LoRA", f"ppo {grpo} output_dir=grpo --dry-run", "LoRA adapters of rank 8")
        self.run(
            "GRPO with LoRA, to the first checkpoint", f"ppo {grpo} output_dir=grpo", "grpo/report.html", most=600.0
        )
        self.run("the same again", f"ppo {grpo} output_dir=grpo", "nothing|already|finished|3")
        self.run(
            "other settings, the same folder", f"ppo {grpo} output_dir=grpo learning_rate=1e-3", "resume_changed", 2
        )
        ppo = f"ppo algorithm=ppo {own} trainer.total_training_steps=3 output_dir=ppo"
        self.stop_after("PPO, Ctrl-C in the second step", ppo, "step 1/3")
        self.run("PPO goes on", ppo, "ppo/report.html")
        self.whole_steps()
        tools = f"{TOOL}.enable=true {TOOL}.function_tool_path=tools.py"
        template = "actor_rollout_ref.model.custom_chat_template=tools.jinja"
        (self.folder / "tools.jinja").write_text(tool_template())
        agent = f"ppo {PLAIN.replace('128', '768')} data.max_response_length=64 {DATA} {REWARD} {template} {tools}"
        agent += " num_generations=2"
        self.run(
            "the plan of an agent",
            f"{agent} {TOOL}.max_assistant_turns=3 --dry-run",
            "tools of tools.py, at most 3 turns",
        )
        self.run(
            "an agent with a tool", f"{agent} trainer.total_training_steps=1 output_dir=agent", "agent/report.html"
        )
        self.run(
            "eval",
            f"eval grpo/huggingface/actor {DATA.replace('train', 'val')} {REWARD} {sizes} eval.out=evaluated",
            "pass@1|mean@1",
        )
        self.run("chat", "chat ppo/huggingface/actor --critic ppo/huggingface/critic", "value", text="What is 2 + 2?\n")
        self.run("report", "report ppo", "report.html")

    def whole_steps(self) -> None:
        """Steps 1, 2, 3 are each in the metrics once, and the report is a page."""
        if self.only or not (self.folder / "ppo/metrics.jsonl").exists():
            return
        steps = [json.loads(line)["step"] for line in (self.folder / "ppo/metrics.jsonl").read_text().splitlines()]
        said = f"steps {steps}, report of {(self.folder / 'ppo/report.html').stat().st_size:,} bytes"
        self.note("steps after stop and resume", said, r"steps \[(0, )?1, 2, 3\]", (0, 0), (0.0, 1.0))

    def table(self) -> str:
        lines = ["| what | exit | s | what it printed | |", "|---|---|---|---|---|"]
        for name, code, seconds, line, good in self.rows:
            said = " ".join(line.replace(str(self.folder), ".").replace("|", "\\|").split())
            lines.append(f"| {name} | {code} | {seconds:.1f} | {said[:160]} | {'yes' if good else 'NO'} |")
        return "\n".join(lines)


def tool_template() -> str:
    """The template of the tutorial, which shows tools."""
    page = (Path(__file__).parents[1] / "docs/tutorials/tool_agent.md").read_text()
    block = page.partition("cat > tools.jinja <<'END'\n")[2].partition("    END\n")[0]
    return "\n".join(line.removeprefix("    ") for line in block.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--only", default="", help="commands with this word in their name")
    parser.add_argument("--write", type=Path, help="a page whose table is replaced by this one")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore, children too
    with tempfile.TemporaryDirectory() as folder:
        day = Afternoon(Path(folder), str(args.model.absolute()) if args.model else "tiny", args.only)
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        day.prepare()
        day.mistakes()
        day.runs()
        if args.write:
            write_block(args.write, "new_user", day.table())
    failed = [name for name, *_, good in day.rows if not good]
    print(f"{len(day.rows) - len(failed)} of {len(day.rows)} as they should be")
    sys.exit(1 if failed or not day.rows else 0)


if __name__ == "__main__":
    main()
