"""Training of a reward model from preference pairs, on the engine and the loop of supervised training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from valor.algorithms import bradley_terry_loss
from valor.config import RMConfig
from valor.data.preference_accuracy import as_metrics, as_table, preference_accuracy
from valor.data.preferences import PreferenceDataset, load_preferences
from valor.data.reward_texts import RewardTexts, longest_text
from valor.models.load import load_model_config, load_tokenizer
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
    shown: ClassVar = {
        "train/loss": "loss",
        "train/accuracy": "accuracy",
        "train/lr": "lr",
        "val/loss": "val loss",
        "val/accuracy": "val accuracy",
    }
    config: RMConfig
    val: PreferenceDataset | None

    def __init__(self, config: RMConfig, command: str) -> None:
        model = config.model
        tokenizer = load_tokenizer(
            model.tokenizer_path or model.path,
            trust_remote_code=model.trust_remote_code,
            custom_chat_template=model.custom_chat_template,
        )
        positions = getattr(load_model_config(model).get_text_config(), "max_position_embeddings", None)
        longest = min(config.data.max_length, longest_text(tokenizer, positions) or config.data.max_length)
        self.texts = RewardTexts(tokenizer, longest)
        self.found: dict[str, Any] | None = None  # of the present weights
        train, val = load_preferences(config, self.texts)
        super().__init__(config, command, tokenizer, train, val)

    def role_spec(self) -> RoleSpec:
        given = {"separator_id": self.texts.separator_id, "pad_token_id": self.tokenizer.pad_token_id}
        return RoleSpec(PreferenceWorker, {"config": self.role_config, "total_steps": self.total_steps, **given})

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
        """As every run; beside the model its accuracy (JSON) and a model card."""
        super().export()
        if self.found is None:  # a finished run that was started again
            self.validate()
        if self.found is not None:
            table = as_table(self.found)
            self.record.say(f"on {self.found['pairs']} held-out pairs:\n{table}")
            write_atomically(self.export_dir(ROLE) / ACCURACY_FILE, json.dumps(self.found, indent=2) + "\n")
        write_atomically(self.export_dir(ROLE) / "README.md", self._card())

    def _card(self) -> str:
        data, loss = self.config.data, self.config.loss
        form = "prompt and response as one text, a blank line between them,"
        if self.texts.as_chat:
            form = "the conversation, rendered by the tokenizer's chat template,"
        elif self.texts.as_pair:
            form = "prompt and response as a pair of texts"
        measured = as_table(self.found) if self.found is not None else "Nothing was held out to measure it on."
        extra = [f"margin {loss.margin:g}"] if loss.margin else []
        extra += [f"centering {loss.center_coef:g}"] if loss.center_coef else []
        files = ", ".join(Path(file).name for file in data.train_files)
        return f"""\
---
library_name: transformers
pipeline_tag: text-classification
tags: [reward-model]
---

# Reward model

A sequence classifier of one label on `{Path(self.config.model.path).name}`: the higher its logit, the better the
response. Trained with Valor on {len(self.train):,} preference pairs ({files}), {self.step:,} steps of
{data.train_batch_size} pairs, {", ".join(["Bradley-Terry loss", *extra])}.

It reads {form} of at most {self.texts.max_length:,} tokens.

```python
from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained(path)
```

```bash
valor ppo reward.reward_model.enable=true reward.reward_model.model_path=PATH ...
```

## Held-out pairs

{measured}
"""
