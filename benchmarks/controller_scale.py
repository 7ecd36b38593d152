"""How the controller grows with the cluster: a real driver, and ranks that only sleep and return columns of true size.

    python benchmarks/controller_scale.py                           # 1 to 1,024 ranks, 512 episodes of 2,048 tokens
    python benchmarks/controller_scale.py --ranks 64 --episodes 2048 --tokens 8192

Collector, trainer, graders and data plane are those of a PPO run with a critic and a reference policy. The ranks are
one process that answers for all of them. What travels goes through shared memory as Ray moves it: the driver's
arguments are copied in, results are read-only views that the driver copies, and columns that stay with the ranks are
files there, to which the driver has references. Ray's own calls are not among this.

Printed are the seconds by which a phase takes longer than its ranks do, the seconds of processor time for which ranks
wait ("own CPU": of the driver's thread, not while ranks are at work) and that the driver takes in all, and its memory.
The share of a step is that of "own CPU", which depends little on what else the machine does. The ranks take their time
in the last step, episodes arrive throughout the generation, and what the driver does meanwhile costs nothing; with
--step-seconds 0 all that a phase waits for counts.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from valor.agents.episode import Episode
from valor.config import PPOConfig, load
from valor.controller import start
from valor.controller.group import Arguments, Feed, Sink, WorkerGroup
from valor.controller.placement import MAIN, Placement, ResourcePool
from valor.data.batch import Batch
from valor.data.stored import Part, Stored, StoredColumn
from valor.lab import arithmetic
from valor.trainer.ppo import PPORun
from valor.workers.dispatch import dispatch_of
from valor.workers.host import RoleSpec

# What the ranks compute, the phase that waits for it, and its share of a step's seconds.
WORK = {
    ("rollout", "generate"): ("gen", 0.50),
    ("actor", "compute_log_probs"): ("old_log_prob", 0.07),
    ("ref", "compute_log_probs"): ("ref", 0.07),
    ("critic", "compute_values"): ("values", 0.06),
    ("critic", "update"): ("update_critic", 0.15),
    ("actor", "update"): ("update_actor", 0.15),
}
PHASES = ["gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "metrics"]
INLINE_BYTES = 100_000  # Ray sends less than that with the call itself
UPDATES = 4  # mini-batches of a role in a step
SAMPLES = 8  # of a prompt
PROMPT_TOKENS = 7  # of a question of the embedded task


class Store:
    """Objects in shared memory: putting one copies its tensors, getting one gives read-only views of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = (f"{os.getpid()}_{number}" for number in itertools.count())

    def put(self, value: Any) -> tuple[str, bytes, list[Any]]:
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        name, views = next(self._names), [buffer.raw() for buffer in buffers]
        if sum(view.nbytes for view in views) < INLINE_BYTES:
            return "", head, [bytes(view) for view in views]
        with (self._folder / name).open("wb") as file:
            for view in views:
                file.write(view)
        return name, head, [view.nbytes for view in views]

    def get(self, reference: tuple[str, bytes, list[Any]]) -> Any:
        name, head, sizes = reference
        if not name:
            return pickle.loads(head, buffers=sizes)
        path, ends = self._folder / name, list(itertools.accumulate(sizes))
        views = [memoryview(b"")] * len(ends)
        if ends and ends[-1]:
            with path.open("rb") as file:
                whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            views = [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        path.unlink(missing_ok=True)  # what is mapped stays until the last view is gone
        return pickle.loads(head, buffers=views)


@dataclass(frozen=True)
class Kept(Part):
    """A tensor that the other process keeps."""

    path: str
    shape: tuple[int, int]
    dtype: torch.dtype

    @staticmethod
    def read(parts: Sequence[Kept]) -> list[Stored]:
        kinds = [np.dtype(str(part.dtype).removeprefix("torch.")) for part in parts]
        pairs = zip(parts, kinds, strict=True)
        return [(np.memmap(part.path, kind, "r", shape=part.shape), None) for part, kind in pairs]


def answer_for_ranks(pipe: Any, folder: Path, tokens: int) -> None:
    """The other process: the results of all ranks, one after the other."""
    store, kept = Store(folder), list[str]()
    while True:
        (role, method, stays, with_sink), calls = pipe.recv()
        found, told = [], []
        if method == "generate":  # those of the step before
            for path in kept:
                os.unlink(path)
            kept.clear()
        for reference in calls:
            (batch, *_), _ = store.get(reference)
            result = columns(role, method, batch, tokens)
            for name in stays if len(batch) else ():
                if name in result:
                    kept.append(f"{folder}/{name}_{len(kept)}")
                    result[name].numpy().tofile(kept[-1])
                    shape, dtype = tuple(result[name].shape), result[name].dtype
                    result[name] = StoredColumn.of(Kept(kept[-1], shape, dtype))  # type: ignore[arg-type]
            found.append(store.put(result))
            if with_sink and len(batch):
                keys = map(tuple, batch["episode_key"].tolist())
                told += [pickle.dumps(episode(key, lengths_of(key[2], tokens)), protocol=5) for key in keys]
        if method == "update":
            found = found[:1] * len(found)  # a short answer: the driver does not listen while it asks the next thing
        pipe.send((found, told))


def columns(role: str, method: str, batch: Batch, tokens: int) -> Any:
    """What a rank returns for its rows."""
    if method == "update":
        return {"loss": 0.0, "grad_norm": 1.0, "skipped": 0.0}
    if method == "generate":
        size = (len(batch), tokens)
        lengths = torch.tensor([lengths_of(sample, tokens) for _, _, sample in batch["episode_key"].tolist()])
        log_probs, mask = torch.rand(size).log(), (torch.arange(tokens) < lengths[:, None]).float()
        ids = {"responses": 50 * mask.long(), "response_lengths": lengths}
        whole = {
            "turn_ids": torch.ones(size, dtype=torch.long),
            "weights_versions": torch.zeros(size, dtype=torch.long),
        }
        return Batch(
            {**ids, **whole, "response_mask": mask, "rollout_log_probs": log_probs, "is_finite": lengths > 0},
            {"finish_reason": ["length"] * len(batch), "response_text": ["four" * n for n in lengths.tolist()]},
        )
    names = {"actor": ("old_log_probs", "entropy"), "ref": ("ref_log_probs",), "critic": ("values",)}[role]
    return Batch({name: torch.rand(batch["responses"].shape).log() for name in names})


def lengths_of(sample: int, tokens: int) -> int:
    """Of the answer number `sample`: from a quarter of the most tokens to all of them, 0.62 of them on average."""
    return max(tokens * (256 + (sample * 2654435761 >> 7) % 769) // 1024, 1)


def episode(key: tuple[int, ...], tokens: int) -> Episode:
    """What is told of a row as soon as it has ended."""
    return Episode(key, (), "length", text="four" * tokens)


class SleepingGroup(WorkerGroup):
    """Ranks that take `seconds` for a step's work, and none of the driver's time."""

    apart = True

    def __init__(self, pool: ResourcePool, specs: dict[str, RoleSpec], tokens: int, seconds: float) -> None:
        super().__init__(pool, specs)
        self.seconds, self._free_at = seconds, 0.0
        self.away: dict[str, float] = defaultdict(float)  # by phase: while ranks are at work
        self.hidden = 0.0  # processor time of the driver's thread while the ranks are at work
        self.calls = 0
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self._store = Store(Path(self._folder.name))
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        arguments = (other, Path(self._folder.name), tokens)
        self._process = spawn.Process(target=answer_for_ranks, args=arguments, daemon=True)
        self._process.start()

    def run(
        self, role: str, method: str, calls: list[Arguments], sink: Sink | None = None, feed: Feed | None = None
    ) -> list[Any]:
        self.calls += len(calls)
        if (role, method) not in WORK:
            answers = {"layout": dict.fromkeys(self.specs), "peak_memory": {}, "needs_weights": False}
            if method == "layout":
                return [dict.fromkeys(self.specs, rank) for rank in range(len(calls))]
            return [answers.get(method, 0)] * len(calls)
        return self.start(role, method, calls, sink)()

    def start(
        self, role: str, method: str, calls: list[Arguments], sink: Sink | None = None
    ) -> Callable[[], list[Any]]:
        phase, share = WORK[role, method]
        cpu, busy = time.thread_time(), time.perf_counter() < self._free_at
        given, stays = [self._store.put(call) for call in calls], dispatch_of(self.specs[role].cls, method).stays
        self._pipe.send(((role, method, stays, sink is not None), given))
        lasts = self.seconds * share / (UPDATES if method == "update" else 1)
        begins = max(time.perf_counter(), self._free_at)
        self._free_at = begins + lasts
        self.hidden += time.thread_time() - cpu if busy else 0.0
        started = time.thread_time()

        def finish() -> list[Any]:
            asked = time.perf_counter()
            self.hidden += time.thread_time() - started if asked < begins + lasts else 0.0
            found, told = self._pipe.recv()
            cpu = time.thread_time()
            if not lasts:  # the one process makes all columns, which counts for nothing
                self.away[phase] += time.perf_counter() - asked
            for number, one in enumerate(told):
                _sleep_until(begins + lasts * (number + 1) / len(told))
                assert sink is not None
                sink(pickle.loads(one))
            self.hidden += time.thread_time() - cpu if lasts else 0.0
            _sleep_until(begins + lasts)
            self.away[phase] += lasts
            return [self._store.get(one) for one in found]

        return finish

    def close(self) -> None:
        self._process.kill()  # after an error it may be at work for nobody
        self._process.join()
        self._folder.cleanup()


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


class Memory:
    """The most memory of its own that this process has had since `begin`, in GiB."""

    def __init__(self) -> None:
        self.most, self._ended = 0.0, threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            lines = Path("/proc/self/status").read_text().splitlines()
            own = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
            self.most = max(self.most, own / 2**20)


def measure(args: argparse.Namespace, ranks: int, out: Path) -> dict[str, float]:
    """Seconds of the driver by phase, and GiB, in the last of `--steps` steps."""
    config = load(settings(args, out), PPOConfig).config
    pool = ResourcePool(max(ranks // 8, 1), min(ranks, 8), "cpu", 1)
    groups: list[SleepingGroup] = []

    def start_group(pool: ResourcePool, specs: dict[str, RoleSpec], **_: Any) -> SleepingGroup:
        groups.append(SleepingGroup(pool, specs, args.tokens, args.step_seconds))
        return groups[-1]

    real, start.start_group = start.start_group, start_group  # type: ignore[assignment]
    memory, found = Memory(), {}
    try:
        with ExitStack() as stack:
            run = PPORun(config, "controller_scale")
            run.placement = Placement("ray", {MAIN: pool}, {})
            run.roles = run.start(stack, resuming=False)
            stack.enter_context(run.record.opened(0, args.steps))
            stack.enter_context(memory.watched())
            for run.step in range(1, args.steps + 1):
                groups[0].away.clear()
                groups[0].seconds = args.step_seconds if run.step == args.steps else 0.0
                groups[0].calls, memory.most = 0, 0.0
                began, began_cpu, began_own = time.perf_counter(), time.process_time(), time.thread_time()
                groups[0].hidden = 0.0
                metrics = run.train_step()
                run.log(metrics)
                whole, cpu = time.perf_counter() - began, time.process_time() - began_cpu
                own = time.thread_time() - began_own - groups[0].hidden
                away = groups[0].away
                found = {phase: metrics.get(f"timing_s/{phase}", 0.0) - away[phase] for phase in PHASES}
                found["rest"] = whole - sum(metrics.get(f"timing_s/{phase}", 0.0) for phase in PHASES)
                found |= {
                    "all": whole - sum(away.values()),
                    "own CPU": own,
                    "CPU": cpu,
                    "calls": groups[0].calls,
                    "GiB": memory.most,
                }
    finally:
        start.start_group = real
    return found


def settings(args: argparse.Namespace, out: Path) -> list[str]:
    """Of the run."""
    model = args.model or arithmetic.make_model(out / "model", seed=0)
    prompts = args.episodes // SAMPLES
    file = arithmetic.make_data(out / "data", seed=0, num_val=16, num_demonstrations=1, num_sft_val=1).train
    actor = "actor_rollout_ref"
    return [
        f"data.train_files={file}",
        "data.val_files=null",
        f"data.train_batch_size={prompts}",
        "data.max_prompt_length=64",
        f"data.max_response_length={args.tokens}",
        f"{actor}.model.path={model}",
        f"+{actor}.model.override_config.max_position_embeddings={args.tokens + 64}",
        f"{actor}.rollout.n={SAMPLES}",
        f"{actor}.actor.ppo_mini_batch_size={max(prompts // UPDATES, 1)}",
        f"{actor}.actor.use_kl_loss=true",
        f"{actor}.rollout.calculate_log_probs=true",
        f"critic.model.path={model}",
        f"critic.ppo_mini_batch_size={max(prompts // UPDATES, 1)}",
        f"trainer.default_local_dir={out / 'run'}",
        f"reward.custom_reward_function.path={Path(__file__).with_name('length_reward.py')}",
        "trainer.device=cpu",
        "trainer.report=false",
        *args.overrides,
    ]


def table(rows: Sequence[tuple[int, dict[str, float]]], step_seconds: float) -> str:
    names = [*PHASES, "rest", "all", "own CPU", "CPU"]
    lines = [
        f"| ranks | {' | '.join(names)} | of a 60 s step | GiB | calls of ranks |",
        "|---:" * (len(names) + 4) + "|",
    ]
    for ranks, found in rows:
        cells = [f"{found[name]:.2f}" for name in names]
        share = found["own CPU"] / 60
        lines.append(f"| {ranks} | {' | '.join(cells)} | {share:.1%} | {found['GiB']:.1f} | {found['calls']:.0f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--episodes", type=int, default=512, help=f"{SAMPLES} of a prompt")
    parser.add_argument("--tokens", type=int, default=2048, help="of a response")
    parser.add_argument("--steps", type=int, default=2, help="the last one is measured")
    parser.add_argument("--step-seconds", type=float, default=60.0, help="of the ranks' work in the last step")
    parser.add_argument("--model", type=Path, help="a model directory, for its tokenizer; else the embedded task's")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further settings of the run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as out:
            rows.append((ranks, measure(args, ranks, Path(out))))
        print(table(rows[-1:], args.step_seconds).splitlines()[-1], flush=True)
    print(f"\n{args.episodes} episodes of {PROMPT_TOKENS} + {args.tokens} tokens, seconds of the driver:\n")
    print(table(rows, args.step_seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
