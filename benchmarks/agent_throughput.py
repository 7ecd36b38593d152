#!/usr/bin/env python3
"""Episodes a second while tools take their time: many episodes beside one native engine.

    python benchmarks/agent_throughput.py                      # 192 episodes of 4 turns, 64 in flight
    python benchmarks/agent_throughput.py --tool-ms 0 50 --deterministic

A turn has --tokens tokens of a tiny random Qwen2; between two turns stands a call of a tool, a blocking function that
sleeps, in the toolbox that runs use. "no tool": the observation comes at once, without a toolbox. The settings take
turns, round by round, after one round that is not counted; medians are printed.
"""

import argparse
import os
import statistics
import time

import torch

from rollout_speed import tiny_model
from valor.agents.episode import Episode
from valor.agents.formats import ToolCall
from valor.agents.loops import Limits, Play, Task
from valor.agents.runner import EpisodeRunner
from valor.agents.tool_sources import function_source
from valor.agents.tools import Toolset
from valor.rollout.base import SamplingParams
from valor.rollout.native.engine import NativeEngine

PROMPT, OBSERVATION = [5] * 32, [7] * 16


def toolset(seconds: float) -> Toolset:
    """One tool that takes so long."""

    def look(text: str) -> str:
        """Looks.

        Args:
            text: at what
        """
        time.sleep(seconds)
        return text

    return Toolset([function_source([look])])


def play_all(engine: NativeEngine, tools: Toolset | None, args: argparse.Namespace, number: int) -> float:
    """Seconds for all episodes."""
    limits = Limits(1000, 1000)
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    tasks = [Task((0, number, i), PROMPT, params, {"extra_info": {}}) for i in range(args.episodes)]

    async def play(task: Task, runner: EpisodeRunner) -> Episode:
        playing = Play(task, runner.generate, limits, task.prompt_ids)
        toolbox = None if tools is None else tools.toolbox()
        if toolbox is not None:
            await toolbox.open({})
        for turn in range(args.turns):
            if turn:
                if toolbox is not None:
                    await toolbox.call(ToolCall("look", {"text": "x"}))
                playing.observe(OBSERVATION)
            await playing.turn()
        return playing.end("stop")

    runner = EpisodeRunner(play, most=args.in_flight, max_tokens=limits.model, deterministic=args.deterministic)
    start = time.perf_counter()
    episodes = runner.run(engine, tasks)
    assert all(len(episode.turns) == args.turns for episode in episodes)
    return time.perf_counter() - start


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool-ms", type=float, nargs="+", default=[0, 50, 500])
    parser.add_argument("--episodes", type=int, default=192)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--deterministic", action="store_true", help="as rollout.agent.deterministic=true")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    model, _ = tiny_model(1)
    engine = NativeEngine(model.eval(), eos_token_ids=[])
    settings: dict[str, Toolset | None] = {"no tool": None}
    settings |= {f"{ms:g} ms": toolset(ms / 1000) for ms in args.tool_ms}
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    for number in range(args.rounds + 1):
        for name, tools in settings.items():
            seconds[name].append(play_all(engine, tools, args, number))
    what = f"{args.episodes} episodes of {args.turns} turns x {args.tokens} tokens, {args.in_flight} in flight"
    print(f"{what}, {args.threads} thread(s), load {os.getloadavg()[0]:.1f}\n")
    print("| tool | seconds | episodes a second | x no tool |\n|---|---:|---:|---:|")
    base = statistics.median(seconds["no tool"][1:])
    for name, times in seconds.items():
        median = statistics.median(times[1:])
        print(f"| {name} | {median:.2f} | {args.episodes / median:.1f} | {median / base:.2f} |")


if __name__ == "__main__":
    main()
