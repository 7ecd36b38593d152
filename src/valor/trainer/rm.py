"""Training of a reward model from preference pairs, on the engine and the loop of supervised training."""

from collections.abc import Sequence
from functools import partial

import torch

from valor.algorithms import bradley_terry_loss
from valor.config import RMConfig
from valor.data.batch import Batch
from valor.data.positions import num_positions
from valor.data.preferences import PreferenceDataset, load_preferences, preference_metrics, read_preferences
from valor.data.prompts import check_fits
from valor.data.reward_texts import RewardTexts, longest_text
from valor.data.templates import ask_template, parts_of
from valor.models.load import load_model_config, load_model_tokenizer
from valor.trainer.supervised import Samples, SupervisedRun
from valor.workers.host import RoleSpec
from valor.workers.reward_model import PreferenceWorker


class RewardModelRun(SupervisedRun):
    """Trains a sequence classifier of one label to rank two responses as people do."""

    role = "reward_model"
    title = "reward model training"
    unit = "pairs"
    config: RMConfig
    val: PreferenceDataset | None

    def __init__(self, config: RMConfig, command: str) -> None:
        tokenizer = load_model_tokenizer(config.model)
        described = load_model_config(config.model).get_text_config()
        positions = num_positions(described)
        longest = min(config.data.max_length, longest_text(tokenizer, positions) or config.data.max_length)
        self.fits = partial(check_fits, config.model.path, described)
        self.texts = RewardTexts(tokenizer, longest)
        train, val = load_preferences(config, self.texts, self.fits)
        if self.texts.as_chat:
            parts = parts_of([*pair.prompt, pair.chosen] for pair in train)
            parts |= {"tools"} if any("tools" in pair.template for pair in train) else set()
            ask_template(tokenizer, parts, config.data.apply_chat_template_kwargs, needed=["assistant"])
        super().__init__(config, command, tokenizer, train, val)

    def role_spec(self) -> RoleSpec:
        tokens = {"separator_id": self.texts.separator_id, "pad_token_id": self.tokenizer.pad_token_id}
        return RoleSpec(PreferenceWorker, {"config": self.config, "total_steps": self.total_steps, **tokens})

    def evaluate(self, files: Sequence[str]) -> dict[str, float]:
        """Metrics of `measure` on the pairs in these files."""
        pairs = read_preferences(files, self.config.data)
        return self.measure(PreferenceDataset(pairs, self.texts, self.config.loss.margin, self.fits))

    def measure(self, samples: Samples) -> dict[str, float]:
        """`loss` (without centering), accuracy over all pairs and by source, and its correlation with length."""
        assert isinstance(samples, PreferenceDataset)
        groups, scored = list[list[int]](), list[Batch]()
        for indices in self.validation_batches(samples):
            batch = samples.batch(indices)
            groups.append(indices)
            scored.append(self.roles[self.role].score(batch).union(batch.select(["margin"])))
        order = torch.tensor([i for group in groups for i in group]).argsort()
        scores = Batch.concat(scored).take(order)
        loss = bradley_terry_loss(scores["chosen"], scores["rejected"], margin=scores["margin"]).mean()
        metrics = preference_metrics(scores["chosen"].tolist(), scores["rejected"].tolist(), samples)
        by_source = [f"{key.partition('/')[2]} {metrics[key]:.3f}" for key in metrics if key.startswith("accuracy/")]
        self.record.say(f"accuracy {metrics['accuracy']:.3f} on {len(samples)} pairs: {', '.join(by_source)}")
        return {"loss": float(loss)} | metrics
