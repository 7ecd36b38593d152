"""`valor ppo` under several layouts, one after another on one cluster, with megatron-core on the host."""

import json
import sys

from forked import Forks
from forked_ray import forked_workers


def main(commands: list[list[str]]) -> None:
    import ray

    forks = Forks("megatron_on_cpu", "valor.trainer.ppo", "valor.engines.megatron.engine")
    with forked_workers(forks):
        ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False)
        from valor.trainer.main_ppo import main as ppo

        for command in commands:
            assert ppo(command) == 0
    ray.shutdown()
    forks.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
