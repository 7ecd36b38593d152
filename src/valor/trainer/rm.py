"""Training of a reward model from preference pairs, on the engine and the loop of supervised training."""

import json
from collections.abc import Sequence
from typing import Any

from valor.algorithms import bradley_terry_loss
from valor.config import RMConfig
from valor.data.preferences import (
    PreferenceDataset,
    as_metrics,
    load_preferences,
    preference_accuracy,
    read_preferences,
)
from valor.data.reward_texts import RewardTexts, longest_text
from valor.models.load import load_model_config, load_model_tokenizer
from valor.tracking.rundir import write_atomically
from valor.trainer.supervised import Samples, SupervisedRun
from valor.workers.host import RoleSpec
from valor.workers.reward_model import PreferenceWorker

ROLE = "reward_model"
ACCURACY_FILE = "accuracy.json"


class RewardModelRun(SupervisedRun):
    """A sequence classifier of one label learns which of two responses people prefer."""

    role = ROLE
    title = "reward model training"
    unit = "pairs"
    config: RMConfig
    val: PreferenceDataset | None

    def __init__(self, config: RMConfig, command: str) -> None:
        tokenizer = load_model_tokenizer(config.model)
        positions = getattr(load_model_config(config.model).get_text_config(), "max_position_embeddings", None)
        longest = min(config.data.max_length, longest_text(tokenizer, positions) or config.data.max_length)
        self.texts = RewardTexts(tokenizer, longest)
        self.found: dict[str, Any] | None = None  # of the present weights
        train, val = load_preferences(config, self.texts)
        super().__init__(config, command, tokenizer, train, val)

    def role_spec(self) -> RoleSpec:
        given = {"separator_id": self.texts.separator_id, "pad_token_id": self.tokenizer.pad_token_id}
        return RoleSpec(PreferenceWorker, {"config": self.role_config, "total_steps": self.total_steps, **given})

    def evaluate(self, files: Sequence[str]) -> dict[str, float]:
        """What `measure` finds on the pairs in these files; what was found on the held-out ones stays known."""
        held_out = self.found
        pairs = read_preferences(files, self.config.data)
        metrics = self.measure(PreferenceDataset(pairs, self.texts, self.config.loss.margin))
        self.found = held_out
        return metrics

    def train_step(self) -> dict[str, Any]:
        self.found = None
        return super().train_step()

    def measure(self, samples: Samples) -> dict[str, float]:
        """`loss` (without centering), accuracy over all pairs and by source, and what length has to do with it."""
        assert isinstance(samples, PreferenceDataset)
        batch = samples.batch(range(len(samples)))
        scores = self.roles[ROLE].score(batch)
        loss = bradley_terry_loss(scores["chosen"], scores["rejected"], margin=batch["margin"]).mean()
        self.found = preference_accuracy(
            scores["chosen"].tolist(),
            scores["rejected"].tolist(),
            [pair.source for pair in samples],
            [len(pair.chosen) for pair in samples],
            [len(pair.rejected) for pair in samples],
        )
        return {"loss": float(loss)} | as_metrics(self.found)

    def export(self) -> None:
        """As every run; beside the model its accuracy (JSON)."""
        super().export()
        if self.found is None:  # a finished run that was started again
            self.validate()
        if self.found is not None:
            accuracy = f"accuracy {self.found['accuracy']:.3f} on {self.found['pairs']} held-out pairs"
            self.record.say(f"{accuracy}: {self.export_dir(ROLE) / ACCURACY_FILE}")
            write_atomically(self.export_dir(ROLE) / ACCURACY_FILE, json.dumps(self.found, indent=2) + "\n")
