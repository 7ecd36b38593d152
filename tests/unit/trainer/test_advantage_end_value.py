"""The critic's value after the last token, which a response that was cut off goes on with."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.lab import arithmetic
from valor.workers.critic import CriticWorker
from valor.workers.host import RoleSpec, RunFacts, WorkerHost


@pytest.fixture(scope="module", params=["mse", "bce", "hl_gauss"])
def critic(request, tmp_path_factory) -> Iterator[CriticWorker]:
    model: Path = arithmetic.make_model(tmp_path_factory.mktemp("critic") / "model")
    config = PPOConfig.model_validate(
        {
            "trainer": {"seed": 3},
            "critic": {
                "model": {"path": str(model), "value_head_init": "normal"},
                "value_loss": request.param,
                "fsdp_config": {"dtype": "float32"},
            },
        }
    )
    host = WorkerHost(rank=0, world_size=1, device="cpu", num_threads=1)
    host.connect()
    host.build({"critic": RoleSpec(CriticWorker, {"config": config, "facts": RunFacts(1, [])})})
    yield host.context.roles["critic"]
    host.close()


def test_it_is_the_value_of_the_state_in_which_a_further_token_would_be_chosen(critic):
    rows = Batch(
        {
            "prompts": torch.tensor([[7, 8, 0], [9, 10, 11]]),
            "prompt_lengths": torch.tensor([2, 3]),
            "responses": torch.tensor([[20, 21, 22], [23, 0, 0]]),
            "response_lengths": torch.tensor([3, 1]),
        }
    )
    plain, with_end = critic.compute_values(rows), critic.compute_values(rows, with_end=True)
    assert torch.allclose(plain["values"], with_end["values"], atol=1e-6)
    assert plain["values"][1, 1:].tolist() == [0.0, 0.0]

    longer = Batch({**rows.tensors, "responses": torch.tensor([[20, 21, 22, 50], [23, 50, 0, 0]])})
    longer["response_lengths"] = torch.tensor([4, 2])
    values = critic.compute_values(longer)["values"]
    assert torch.allclose(with_end["bootstrap_values"], torch.stack([values[0, 3], values[1, 1]]), atol=1e-6)
    assert (with_end["bootstrap_values"] - plain["values"][:, 0]).abs().min() > 1e-4
    inside = values[values != 0]
    assert ((inside > 0) & (inside < 1)).all() == (critic.config.value_loss != "mse")
