"""Rules about where roles run: pools, nodes, and how processes share rows and layers out."""

from __future__ import annotations

from valor.config.ppo import PPOConfig


def check_placement(config: PPOConfig) -> list[str]:
    """Every contradiction, one line each."""
    return [*_pools(config), *_sequence_parallel(config), *_tensor_parallel(config)]


def _sequence_parallel(config: PPOConfig) -> list[str]:
    lines, policy = [], config.actor_rollout_ref
    for key, size, packed in (
        ("actor_rollout_ref", policy.actor.ulysses_sequence_parallel_size, policy.model.use_remove_padding),
        ("critic", config.critic.ulysses_sequence_parallel_size, config.critic.model.use_remove_padding),
    ):
        if size > 1 and not packed:
            lines.append(f"sequence parallelism shares packed rows out: set {key}.model.use_remove_padding=true")
    own, other = policy.actor.ulysses_sequence_parallel_size, policy.ref.ulysses_sequence_parallel_size
    if own != other and "full" in config.kl_kinds:
        lines.append(
            f"the exact KL is computed on the actor's rows as they are shared out: set actor_rollout_ref.ref."
            f"ulysses_sequence_parallel_size={own}, as the actor's"
        )
    return lines


def _tensor_parallel(config: PPOConfig) -> list[str]:
    policy, critic, model, trainer = config.actor_rollout_ref, config.critic, config.reward.reward_model, config.trainer
    lora, ulysses = policy.model.lora_rank, policy.actor.ulysses_sequence_parallel_size
    roles: dict[str, tuple] = {"actor": ("actor_rollout_ref.actor", policy.actor.fsdp_config, lora, ulysses)}
    if config.needs_reference:
        roles["ref"] = ("actor_rollout_ref.ref", policy.ref.fsdp_config, 0, policy.ref.ulysses_sequence_parallel_size)
    if critic.enable:
        ulysses = critic.ulysses_sequence_parallel_size
        roles["critic"] = ("critic", critic.fsdp_config, critic.model.lora_rank, ulysses)
    if model.is_role:
        roles["reward_model"] = ("reward.reward_model", model.fsdp_config, 0, 1)
    lines = []
    for role, (key, fsdp, lora, ulysses) in roles.items():
        pool = next((pool for pool in config.pools.values() if role in pool.roles), None)
        nodes, per_node = (
            (trainer.nnodes, trainer.processes_per_node) if pool is None else (pool.nnodes, pool.n_gpus_per_node)
        )
        processes = nodes * per_node if per_node is not None else None
        lines += tensor_parallel_of_role(f"{key}.", fsdp.tensor_parallel_size, processes, lora, ulysses)
    sizes = policy.actor.fsdp_config.tensor_parallel_size, policy.ref.fsdp_config.tensor_parallel_size
    if "full" in config.kl_kinds and sizes[1] not in (1, sizes[0]):
        lines.append(
            "the exact KL is computed on the rows that the actor's processes share: set actor_rollout_ref.ref."
            f"fsdp_config.tensor_parallel_size={sizes[0]}, as the actor's"
        )
    return lines


def tensor_parallel_of_role(key: str, size: int, processes: int | None, lora_rank: int, ulysses: int) -> list[str]:
    """`key`: the section that holds the role's fsdp_config, with a dot, or nothing. `processes` None: not known yet."""
    if size == 1:
        return []
    lines, setting = [], f"{key}fsdp_config.tensor_parallel_size={size}"
    if processes is not None and processes % size:
        lines.append(f"{setting} does not divide the number of processes, {processes}: set it to one that does")
    if ulysses > 1:
        lines.append(f"{setting} and {key}ulysses_sequence_parallel_size={ulysses} do not go together: set one to 1")
    if lora_rank:
        lines.append(f"{setting} does not go with LoRA: set lora_rank=0, or tensor_parallel_size=1")
    return lines


def _pools(config: PPOConfig) -> list[str]:
    lines, homes = [], {}
    for name in config.resource_pools.keys() & config.asked_pools.keys():
        lines.append(
            f"resource_pools.{name}: that is the name of the pool that {name}'s own keys ask for: take another"
        )
    present = {"critic": config.critic.enable, "ref": config.needs_reference, "rollout": True}
    present["reward_model"] = config.reward.reward_model.is_role
    for name, pool in config.pools.items():
        for role in pool.roles:
            if role in homes:
                lines.append(f"resource_pools: {role} is in {homes[role]} and in {name}: leave it in one of them")
            if not present[role]:
                lines.append(f"resource_pools.{name}.roles names {role}, which this run does not have: remove it")
            if role == "ref" and "full" in config.kl_kinds:
                lines.append(
                    "the exact KL (kl_loss_type, kl_penalty=full) is computed beside the actor: take ref out of "
                    f"resource_pools.{name}.roles, or take an estimator such as k3"
                )
            homes[role] = name
    trainer = config.trainer
    if trainer.node_rank is not None:
        if trainer.master_addr is None:
            lines.append(
                "trainer.node_rank is for a run started once per node: set trainer.master_addr, the address of node 0"
            )
        if trainer.node_rank >= trainer.nnodes:
            lines.append(
                f"trainer.node_rank={trainer.node_rank} counts from 0 to trainer.nnodes - 1 = {trainer.nnodes - 1}"
            )
        if config.ray_kwargs.ray_init.address is not None:
            lines.append(
                "trainer.node_rank starts Ray itself and ray_kwargs.ray_init.address joins a cluster: drop one"
            )
    elif trainer.master_addr is not None or trainer.master_port is not None:
        lines.append("trainer.master_addr is for a run started once per node: set trainer.node_rank on each")
    if config.pools and config.trainer.controller == "local":
        lines.append(
            f"{', '.join(config.pools)}: a pool has processes of its own and trainer.controller=local is one process: "
            "use ray"
        )
    return lines
