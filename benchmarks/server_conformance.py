"""Whether a server does what generation by servers needs: `python benchmarks/server_conformance.py KIND URL MODEL`.

KIND is server (vLLM's), sglang or trtllm, URL the address as in rollout.server.base_url, MODEL the Hugging Face folder
that the server was started with, whose full forward in float32 is what log-probs are compared with. Start the server in
the precision that it will have, and name it: `--dtype bfloat16` allows for rounding. A line for each check; exit code 1
if one has failed. The server holds the model's own weights at the end, unless it was broken off.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from valor.config import RolloutConfig
from valor.engines.distributed import init_process_group, leave_process_group
from valor.errors import TrainingStopped, UserError, WorkersReplaced
from valor.models.export import published_weights
from valor.models.policy import PolicyModel
from valor.rollout.base import Abort, Output, Request, SamplingParams
from valor.rollout.server.checks import check_server
from valor.rollout.server.engine import ServerEngine

GAPS = {"float32": 1e-4, "bfloat16": 0.5}
TOKENS = 160


class Source:
    """Requests; once `first` of them has an answer, what `then` does and gives."""

    everywhere, max_requests, max_tokens = True, 16, 512

    def __init__(self, asked: Sequence[Request], then: Callable[[], Sequence[Abort]]) -> None:
        self._asked, self._then, self._state = asked, then, 0

    def poll(self, *, wait: bool) -> Sequence[Request | Abort] | None:
        self._state += 1
        if self._state == 1:
            return self._asked
        if self._state == 80:  # polls, 2 ms apart and more
            return self._then()
        return None if self._state > 80 else []


class Conformance:
    """The checks, each a method; a failed one raises."""

    def __init__(self, kind: str, url: str, folder: str, dtype: str, model: str) -> None:
        section = {"base_url": url, "model": model, "weight_updates": "none" if kind == "trtllm" else "filesystem"}
        self.config = RolloutConfig.model_validate(
            {"name": kind, "server": section, "dtype": dtype, "max_model_len": 256}
        )
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.gap, self.version = GAPS[dtype], 0
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.engine = ServerEngine(self.config, eos_token_ids=[])
        self.takes_weights = kind != "trtllm"
        ids = self.tokenizer("The quick brown fox jumps over the lazy dog, and then, after a while, it").input_ids
        self.work = [Request(f"r{i}", ids[: 8 + i], SamplingParams(max_tokens=TOKENS), (1, 1, i)) for i in range(4)]

    def answers_in_tokens_with_the_log_probs_of_training(self) -> None:
        check_server(self.config, self.tokenizer)

    def samples_have_the_log_probs_of_the_model(self) -> None:
        if self.takes_weights:
            self.send(self.model)
        self.compare(self.model, self.engine.generate(self.work))

    def requests_end_early_and_go_on(self) -> None:
        outputs = self.served(lambda: [Abort(one.request_id) for one in self.work])
        assert all(one.finish_reason in ("abort", "length", "stop") for one in outputs), outputs
        again = [
            Request(one.request_id, one.prompt_ids, one.params, one.seed, so_far=had)
            for one, had in zip(self.work, outputs, strict=True)
            if had.finish_reason == "abort"
        ]
        print(f"      {len(again)} ended early, with {[len(one.token_ids) for one in outputs]} tokens")
        whole = {one.request_id: one for one in [*outputs, *self.engine.generate(again)]}
        self.compare(self.model, [whole[one.request_id] for one in self.work])

    def new_weights_are_the_ones_that_sample(self) -> None:
        other = self.changed()
        self.send(other)
        outputs = self.engine.generate(self.work)
        self.compare(other, outputs)
        assert self.distance(self.model, outputs) > 2 * self.gap, "the change is too small to be seen"
        self.send(self.model)
        self.compare(self.model, self.engine.generate(self.work))  # nothing cached is of the others

    def an_update_that_another_run_makes_is_noticed(self) -> None:
        self.send(self.model)
        other = ServerEngine(self.config, eos_token_ids=[])
        policy = PolicyModel(self.model)
        other.sync_weights(published_weights(policy, policy.state_dict().items()), version=1)
        try:
            self.engine.generate(self.work)
        except TrainingStopped:
            return
        raise AssertionError("samples of another run's weights were used")

    # ---- parts

    def served(self, then: Callable[[], Sequence[Abort]]) -> list[Output]:
        found: dict[str, Output] = {}
        asked = [
            Request(one.request_id, one.prompt_ids, one.params, one.seed, lambda o: found.update({o.request_id: o}))
            for one in self.work
        ]
        self.engine.serve(Source(asked, then))
        return [found[one.request_id] for one in self.work]

    def send(self, model: PreTrainedModel) -> None:
        self.version += 1
        policy = PolicyModel(model)
        self.engine.sync_weights(published_weights(policy, policy.state_dict().items()), version=self.version)

    def changed(self) -> PreTrainedModel:
        model = type(self.model)(self.model.config).eval()
        model.load_state_dict(self.model.state_dict())
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std(), alpha=0.5)
        return model

    def distance(self, model: PreTrainedModel, outputs: list[Output]) -> float:
        gaps = []
        for request, output in zip(self.work, outputs, strict=True):
            ids = torch.tensor([[*request.prompt_ids, *output.token_ids]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].float()
            expected = logits.log_softmax(-1).gather(1, ids[0, len(request.prompt_ids) :, None])[:, 0]
            gaps.append(float((expected - torch.tensor(output.log_probs)).abs().max()) if output.token_ids else 0.0)
        return max(gaps)

    def compare(self, model: PreTrainedModel, outputs: list[Output]) -> None:
        distance = self.distance(model, outputs)
        print(f"      |Δ log-prob| at most {distance:.1e} over {sum(len(one.token_ids) for one in outputs)} tokens")
        assert distance <= self.gap, f"log-probs are {distance:.1e} away from the model's, {self.gap:g} is allowed"


CHECKS = ("answers_in_tokens_with_the_log_probs_of_training", "samples_have_the_log_probs_of_the_model")
CHECKS += ("requests_end_early_and_go_on",)
WITH_WEIGHTS = ("new_weights_are_the_ones_that_sample", "an_update_that_another_run_makes_is_noticed")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=["server", "sglang", "trtllm"])
    parser.add_argument("url")
    parser.add_argument("folder", metavar="MODEL")
    parser.add_argument("--dtype", choices=[*GAPS], default="float32")
    parser.add_argument("--name", help="the model's name on the server (default: MODEL)")
    args = parser.parse_args(argv)
    init_process_group("cpu")
    failed = 0
    try:
        checks = Conformance(args.kind, args.url, args.folder, args.dtype, args.name or args.folder)
        for name in (*CHECKS, *(WITH_WEIGHTS if checks.takes_weights else ())):
            try:
                getattr(checks, name)()
            except (AssertionError, TrainingStopped, WorkersReplaced, UserError, ValueError) as error:
                failed += 1
                print(f"FAIL  {name.replace('_', ' ')}: {error}")
            else:
                print(f"ok    {name.replace('_', ' ')}")
    finally:
        leave_process_group()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
