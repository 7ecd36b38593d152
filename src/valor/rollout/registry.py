"""Generation engines by the name that `actor_rollout_ref.rollout.name` gives."""

from valor.algorithms.registry import Named
from valor.rollout.native.spec import NATIVE
from valor.rollout.server.options import SERVERS
from valor.rollout.vllm.options import VLLM

GENERATION_ENGINES = Named("actor_rollout_ref.rollout.name", {spec.name: spec for spec in (NATIVE, VLLM, *SERVERS)})
