"""Generators beside training that die, wherever that falls: what they were at begins anew, once, by weights that were
sent."""

import threading
import time
from collections import Counter
from contextlib import closing
from types import SimpleNamespace

import pytest

from valor.agents.episode import Episode, episode_rows
from valor.collector.ahead import PromptSupply
from valor.collector.generation import Generation
from valor.collector.grading import Grading
from valor.collector.supply import BatchSupply
from valor.config import PPOConfig, load
from valor.controller.group import Pools, WorkerGroup
from valor.controller.placement import Placement, ResourcePool
from valor.data.prompts import PromptRow
from valor.data.sampler import PromptSampler
from valor.errors import WorkerDied, WorkersReplaced
from valor.rollout.base import Output, Span
from valor.tracking.metrics import Timer
from valor.workers.actor import ActorWorker
from valor.workers.host import RoleSpec
from valor.workers.rollout import RolloutWorker

pytestmark = pytest.mark.timeout(30)

POOL = ResourcePool(1, 1, "cpu", 1)
PROMPTS = 2  # of a step


class Process(WorkerGroup):
    """Hosts `roles`. Answers all prompts but those of draws from `held` on. Another takes the place of one that died,
    as under Ray: the call is repeated, unless it needs weights."""

    def __init__(self, *roles):
        classes = {"actor": RoleSpec(ActorWorker, {}), "rollout": RoleSpec(RolloutWorker, {}, replaceable=True)}
        super().__init__(POOL, {role: classes[role] for role in roles})
        self._layouts = [dict.fromkeys(roles, 0)]
        self.updates, self.held, self.called = 0, 100, Counter()
        self._death, self._weights, self._under_way = None, None, {}

    def die(self):
        self._death = WorkerDied("killed")

    @property
    def dead(self):
        return isinstance(self._death, WorkerDied)

    def lose_its_server(self):
        """What it asks was started anew, and has neither requests nor weights."""
        self._death = WorkersReplaced("the server was started anew")

    def run(self, role, method, calls, sink=None, feed=None):
        self.called[method] += 1
        ((args, more),) = calls
        more = more | ({} if sink is None else {"sink": sink}) | ({} if feed is None else {"feed": feed})
        try:
            if self.dead:
                self._live()
            return [getattr(self, f"_{method}")(*args, **more)]
        except WorkerDied:
            self.num_replacements += 1
            if method in ("receive_weights", "generate", "generate_ahead"):
                raise WorkersReplaced("it died") from None
            return self.run(role, method, calls, sink, feed)

    def _live(self):
        death, self._death = self._death, None
        if death is not None:
            self._weights, self._under_way = None, {}
            raise death

    def close(self):
        pass

    def _version(self):
        return self.updates

    def _open_channel(self):
        return "here", 1

    def _send_weights(self, receivers):
        pass

    def _needs_weights(self, version):
        return self._weights != version

    def _receive_weights(self, address, version):
        self._weights = version

    def _update_weights(self):
        self._weights = self.updates

    def _sleep(self):
        pass

    def _generate(self, prompts, params, sink=None):
        keys = [tuple(key) for key in prompts["episode_key"].tolist()]
        while keys[0][1] >= self.held:
            self._live()
            time.sleep(0.001)
        return episode_rows([self._answer(key) for key in keys])

    def _generate_ahead(self, *, sink, feed):
        while True:
            self._live()
            for message in feed(0):
                match message:
                    case ("add", tasks, attempt):
                        self._under_way |= {task.key: attempt for task in tasks}
                    case ("drop", keys):
                        self._under_way = {key: at for key, at in self._under_way.items() if key not in keys}
                    case ("pause",):
                        return 1.0, 0.5
            for key in [key for key in self._under_way if key[1] < self.held]:
                sink((self._answer(key), self._under_way.pop(key)))
            time.sleep(0.001)

    def _answer(self, key):
        assert self._weights is not None, "it has none"
        return Episode.of_one_turn(key, Output("r", [1], [-0.5], "stop", (Span(1, self._weights),)))


class Run:
    """Steps of two prompts with one answer each."""

    def __init__(self, kind, steps, *settings, mode="separate_async"):
        given = ["data.train_files=x", f"data.train_batch_size={PROMPTS}", "actor_rollout_ref.rollout.n=1"]
        given += [f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}", f"trainer.v1.trainer_mode={mode}"]
        config = load([*given, *settings], PPOConfig).config
        self.actor = self.generator = Process("actor", "rollout")
        groups, home = {"main": self.actor}, {}
        if mode == "separate_async":
            self.actor, self.generator = Process("actor"), Process("rollout")
            groups, home = {"main": self.actor, "apart": self.generator}, {"rollout": "apart"}
        roles = Pools(Placement("ray", dict.fromkeys(groups, POOL), home), groups)
        inputs = SimpleNamespace(
            train=[PromptRow(i, [1, 2], [], "s", None, {}) for i in range(64)],
            sampler=PromptSampler(64, PROMPTS),
            total_steps=steps,
            rewards=SimpleNamespace(one_by_one=False),
            with_text=lambda batch: batch,
            agents=None,
            judge=None,
        )
        self.supply = kind(Generation(config, inputs, roles, print), Grading(config, inputs, roles))
        self.trained, self.step = [], 0

    def take(self):
        self.step += 1
        batch = self.supply.take(PROMPTS, self.step, Timer())
        self.trained += [tuple(key[1:]) for key in batch["episode_key"].tolist()]
        self.actor.updates += 1

    def take_around_a_death(self):
        """A step, the generator's death and replacement, another step."""
        self.generator.held = 2
        self.take()
        self.generator.die()
        end = time.monotonic() + 10
        while not self.generator.num_replacements and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)
        self.generator.held = 100
        self.take()

    def close(self):
        self.supply.close()
        self.supply.generation.roles.close()

    def assert_each_prompt_once(self):
        assert sorted(self.trained) == [(draw, i) for draw in range(1, self.step + 1) for i in range(PROMPTS)]


@pytest.mark.parametrize("last", [False, True], ids=["at its beginning", "at its end"])
def test_one_that_dies_in_a_validation(last):
    """It has the second draw in flight, which the last step would wait for for ever. At the end nobody has sent its
    successor weights: it would answer by those of the model's files."""
    with closing(Run(PromptSupply, 3)) as run:
        run.generator.held = 2
        run.take()
        with run.supply.paused():
            if not last:
                run.generator.die()
            run.supply.generation.weights.publish()
            if last:
                run.generator.die()
            run.supply.generation.roles["rollout"].sleep()
        run.generator.held = 100
        run.take()
        run.take()
        run.assert_each_prompt_once()


def test_one_that_has_died_before_a_step_without_a_transfer():
    """One generation goes on in its place: nothing would end a second one, for which the next pause would wait."""
    with closing(Run(PromptSupply, 4, "trainer.v1.separate_async.parameter_sync_step=2")) as run:
        run.take_around_a_death()
        with run.supply.paused():
            pass
        run.take()
        run.take()
        run.assert_each_prompt_once()


def test_a_batch_is_drawn_again_once():
    prescribed = "trainer.v1.deterministic=true", "trainer.v1.sampler.max_off_policy_threshold=1"
    with closing(Run(BatchSupply, 3, *prescribed)) as run:
        run.take_around_a_death()
        run.take()
        run.assert_each_prompt_once()
        assert run.generator.called["generate"] == 4


def test_one_in_the_trainers_processes_whose_server_is_started_anew():
    with closing(Run(PromptSupply, 3, mode="colocate_async")) as run:
        run.generator.held = 2
        run.take()

        def lose():
            run.generator.lose_its_server()
            run.generator.held = 100

        threading.Timer(0.2, lose).start()
        run.take()
        run.take()
        run.assert_each_prompt_once()
