"""The native engine: batched sampling in the actor's own process, with the actor's own weights.

Every prompt is prefilled once, all but its last token; its samples then start as decode rows whose first input is
that last token. Decoding, sampling and log-probabilities so have one path: a step gives each active row one token.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from valor.data.positions import num_positions
from valor.errors import TrainingStopped, UserError, out_of_memory
from valor.models.export import plain_weights
from valor.models.hf import cache_argument, cache_bytes_per_token, input_device
from valor.models.policy import PolicyModel
from valor.models.routing import routers_of
from valor.rollout.base import Request, RequestSource, RolloutEngine, WeightMode
from valor.rollout.native.attention import generation_mode, has_slots, serving
from valor.rollout.native.cohorts import decode, has_cache
from valor.rollout.native.decoder import Decoder, agrees, packed_linears
from valor.rollout.native.kv_cache import PromptCache, SlotCache, free_bytes
from valor.rollout.native.replays import Capture, Replays, capture_for
from valor.rollout.native.requests import Group, Intake, Row, Waiting
from valor.rollout.sampling import BatchSampler, uniform_stream
from valor.rollout.transfer import checksum
from valor.tracking.progress import report_tokens

# A prefill of this many tokens keeps a processor busy; beyond it, at most this share of a batch may be padding.
ENOUGH_TOKENS, MAX_PADDING = 512, 0.125
MAX_TOKENS = 8192  # of a prefill, which memory has to hold
# Most steps between two looks at the source: where no more requests come, and where they may.
CLOSED_SEGMENT, OPEN_SEGMENT = 128, 16
# Steps between two looks at whether a row has ended: a GPU waits for each of them.
GPU_STEPS_PER_TEST = 8
# Share of the memory free at the start that the cache may take. It grows by half.
CACHE_SHARE = 0.9 / 1.5

logger = logging.getLogger(__name__)


class NativeEngine(RolloutEngine):
    """Generates with a Hugging Face causal LM that someone else trains; see `valor.rollout.base.RolloutEngine`.

    `unsharded` is entered around all model calls of one `generate` (FSDP2: parameters gathered and kept).
    `max_num_seqs` bounds the rows decoded together, and so does a GPU's free memory. A row that reaches the model's
    `num_positions` ends with "length". images: prompts may have some, which only the model's own forward pass reads.
    records: outputs have `routes`. UserError: there is nothing to record.
    """

    weight_mode: WeightMode = "shared"
    parallel_size = 1

    def __init__(
        self,
        hf: nn.Module,
        *,
        eos_token_ids: Sequence[int],
        unsharded: Callable[[], AbstractContextManager[object]] = nullcontext,
        max_num_seqs: int = 256,
        images: bool = False,
        records: bool = False,
    ) -> None:
        self._hf, self._cache_argument = hf, cache_argument(hf)
        self._by_cohorts = images or not has_slots(hf)
        if records and self._by_cohorts:
            raise UserError("router_replay.mode=R3 records no experts of models that generate by a cache of their own")
        self._routers = routers_of(hf) if records else None
        self._cached: bool | None = None  # whether the model's own cache works, once that is known
        self._eos = frozenset(eos_token_ids)
        self._unsharded = unsharded
        self._max_num_seqs = max_num_seqs
        self._config = hf.config.get_text_config()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        self._max_model_len = num_positions(self._config) or 2**31
        self._decoder: Decoder | None = None  # while it generates
        self._direct: bool | None = None  # whether a Decoder drives the model, once that is known
        self._capture: Capture | None = None  # of its steps, where they are captured
        self._replays: Replays | None = None  # while it generates so
        self.weights_version: int | None = 0
        self.weights_checksum: int | None = None

    def serve(self, source: RequestSource) -> None:
        """Generate what `source` has until it has no more; UserError when a prompt leaves no room for a new token.

        Where memory runs out, what has not ended starts again, with half as many rows at a time from then on;
        TrainingStopped where that is one.
        """
        if self.weights_version is None:
            raise ValueError("the engine has no weights: sync_weights comes first")
        with self._unsharded():  # first of all: every rank has a part in it, also one that gets no request
            intake = Intake(source, self._max_model_len, self.weights_version)
            if not intake.pending:
                return
            recording = nullcontext() if self._routers is None else self._routers.recording()
            mode = generation_mode(self._hf, slots=not self._by_cohorts)
            with mode, torch.inference_mode(), recording, self._laid_out():
                while intake.pending:
                    self._attempt(intake)

    def sync_weights(self, weights: Iterable[tuple[str, Tensor]] | None = None, *, version: int) -> None:
        """Record the version; the weights are the actor's own. Raises ValueError when others are pushed."""
        if weights is not None:
            raise ValueError("the native engine shares the actor's weights: none can be pushed")
        self.weights_version = version

    @contextmanager
    def _laid_out(self) -> Iterator[None]:
        """Weights in the layout that is fastest, for the block."""
        if self._by_cohorts:
            if self._cached is None:
                self._cached = has_cache(self._hf)
            yield
            return
        if self._direct is not False:
            try:
                decoder = Decoder(self._hf)
                if self._direct is None:
                    self._direct = agrees(decoder, self._hf)
                    self._capture = capture_for(decoder, self._hf) if self._direct else None
                self._decoder = decoder if self._direct else None
                self._replays = Replays(decoder, self._capture) if self._capture else None
            except (AttributeError, KeyError, TypeError):
                self._direct = False
        try:
            with nullcontext() if self._direct else packed_linears(self._hf):
                yield
        finally:
            if self._replays is not None:
                self._capture = self._replays.capture
            self._decoder = self._replays = None

    def _forward(self, input_ids: Tensor, position_ids: Tensor, cache: PromptCache | SlotCache) -> Tensor:
        """Logits [B, V] after the last of the tokens [B, q], by the model's own forward pass."""
        inputs = {"input_ids": input_ids, "position_ids": position_ids, self._cache_argument: cache}
        with serving(cache):
            return self._hf(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1]

    def _attempt(self, intake: Intake) -> None:
        """Generate all requests, or those that end before memory runs out."""
        most = len(intake.pending) if intake.ended else intake.source.max_requests
        slots = min(self._max_num_seqs, self._affordable(intake.source), most)
        try:
            if self._by_cohorts:
                self._run_cohorts(intake, slots)
            else:
                self._run(intake, slots)
            return
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            if slots == 1:
                raise TrainingStopped(
                    "out of memory in the generation of one sequence: lower data.max_response_length, or set "
                    "param_offload and optimizer_offload of the roles, or rollout.name=vllm"
                ) from error
        self._max_num_seqs = slots // 2
        logger.warning("generation ran out of memory: from now on rollout.max_num_seqs=%d", self._max_num_seqs)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _affordable(self, source: RequestSource) -> int:
        """How many rows of the greatest length the free memory can hold; at least 1."""
        free = free_bytes(input_device(self._hf))
        if free is None:
            return source.max_requests
        element = next(p for p in self._hf.parameters() if p.is_floating_point()).element_size()
        row = cache_bytes_per_token(self._config, element) * min(source.max_tokens, self._max_model_len)
        return max(1, int(CACHE_SHARE * free / row)) if row else source.max_requests

    def _run(self, intake: Intake, slots: int) -> None:
        waiting = Waiting(slots)
        waiting.add(intake.pending)
        while waiting:
            # Turns of episodes have prompts of their own; samples of one prompt come together, and nothing after them.
            compiled = self._decoder is not None and self._decoder.compiled
            shared = compiled and intake.ended and waiting.worth_sharing()
            cache = SlotCache(slots, shared=shared, blocked=compiled, bucketed=self._replays is not None)
            rows: list[Row] = []
            while rows or waiting:
                if groups := waiting.admit(len(rows)):
                    self._prefill(groups, cache, rows)
                while rows and not waiting.can_join(len(rows)):
                    self._decode_segment(cache, rows, CLOSED_SEGMENT if intake.ended else OPEN_SEGMENT)
                    for slot in reversed(range(len(rows))):
                        if reason := rows[slot].finish_reason():
                            intake.finish(_remove(rows, slot, cache), reason)
                    self._poll(cache, rows, waiting, intake, wait=False)
            while not (waiting or intake.ended):  # what has come may have been aborted at once
                self._poll(cache, rows, waiting, intake, wait=True)

    def _run_cohorts(self, intake: Intake, slots: int) -> None:
        """As `_run`, by the model's own cache: prompts of one length at a time."""
        waiting = Waiting(slots)
        waiting.add(intake.pending)
        running: list[Row] = []

        def finish(row: Row) -> bool:
            if row is running[0]:
                waiting.add(intake.poll(wait=False))
                for request in waiting.remove(intake.aborted):
                    intake.deliver(request, request.begun)
            reason = row.finish_reason() or ("abort" if row.request.request_id in intake.aborted else None)
            if reason is not None:
                running[:] = [other for other in running if other is not row]
                intake.finish(row, reason)
                report_tokens(len(row.log_probs))
            return reason is not None

        while waiting or not intake.ended:
            if not waiting:
                waiting.add(intake.poll(wait=True))
                continue
            admitted = waiting.admit(0)
            groups = [group for group in admitted if len(group.prompt_ids) == len(admitted[0].prompt_ids)]
            waiting.add([request for group in admitted[len(groups) :] for request in group.members])
            running[:] = [self._new_row(request, -1) for group in groups for request in group.members]
            decode(self._hf, groups, [*running], finish, cached=self._cached is True)
            intake.aborted.clear()  # the rest had ended before

    def _prefill(self, groups: list[Group], cache: SlotCache, rows: list[Row]) -> None:
        """Run the prompts of `groups` (sorted by length) in padded batches, and add their samples to `rows`."""
        device = input_device(self._hf)
        left = len(groups)
        for batch in _padded_batches(groups):
            prompts, prefill = [group.prompt_ids[:-1] for group in batch], PromptCache()
            width = max(map(len, prompts))
            if width and self._decoder is not None:
                self._decoder.prefill(prompts, prefill)
            elif width:
                # Padding (any token) on the right: causal attention keeps it from touching what comes before.
                padded = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device)
                self._forward(padded, torch.arange(width, device=device)[None], prefill)
            routes = [*self._recorded(len(batch)).cpu()] if width and self._routers else None
            cache.reserve_prompts(left, width)
            left -= len(batch)
            for index, group in enumerate(batch):
                samples = slice(len(rows), len(rows) + len(group.members))
                prompt = cache.add_prompt(prefill, index, len(prompts[index]), samples)
                parts = [] if routes is None else [routes[index][: len(prompts[index])]]
                rows.extend(self._new_row(request, prompt, parts) for request in group.members)

    def _recorded(self, rows: int) -> Tensor:
        """[rows, q, C] routes of the last forward pass."""
        assert self._routers is not None
        return self._routers.recorded().unflatten(0, (rows, -1))

    def _new_row(self, request: Request, prompt: int, routes: Sequence[Tensor] = ()) -> Row:
        params, begun = request.params, request.begun
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        max_new = min(params.max_tokens, self._max_model_len - len(request.prompt_ids))
        drawn = uniform_stream(request.seed, max_new)
        return Row(request, prompt, stops, max_new, drawn, [*begun.token_ids], [], [*routes])

    def _poll(self, cache: SlotCache, rows: list[Row], waiting: Waiting, intake: Intake, *, wait: bool) -> None:
        """Queue new requests and end aborted ones."""
        waiting.add(intake.poll(wait=wait))
        if intake.aborted:
            for request in waiting.remove(intake.aborted):  # they have not started
                intake.deliver(request, request.begun)
            for slot in reversed(range(len(rows))):
                if rows[slot].request.request_id in intake.aborted:
                    intake.finish(_remove(rows, slot, cache), "abort")
            intake.aborted.clear()  # the rest had ended before

    def _decode_segment(self, cache: SlotCache, rows: list[Row], longest: int) -> None:
        """Give all rows one token after another until one of them ends, or for `longest` steps.

        Raises RuntimeError when the model's logits are not finite.
        """
        device = input_device(self._hf)
        sampler = BatchSampler([row.request.params for row in rows], device)
        forward = self._replays or self._decoder or self._forward
        cache.arrange([row.prompt for row in rows], [row.columns for row in rows], device)
        starts = [len(row.token_ids) for row in rows]
        steps = min(longest, *(row.max_new - start for row, start in zip(rows, starts, strict=True)))
        uniforms = np.stack([row.uniforms[n : n + steps] for row, n in zip(rows, starts, strict=True)], axis=1)
        uniforms = torch.from_numpy(uniforms).to(device)
        stops = _stop_table(rows, device)
        new = torch.tensor([row.last_token for row in rows], device=device)
        sampled, scored, routed, ended = [], [], [], torch.zeros((), dtype=torch.bool, device=device)
        per_test = 1 if device.type == "cpu" else GPU_STEPS_PER_TEST
        for step in range(steps):
            cache.advance()
            logits = forward(new[:, None], cache.positions[:, None], cache)
            if self._routers is not None:
                routed.append(self._recorded(len(rows)))
            new, log_probs = sampler(logits, uniforms[step])
            sampled.append(new)
            scored.append(log_probs)
            ended = ended | (new[:, None] == stops).any()
            if (step + 1) % per_test == 0 and bool(ended):
                break
        scores = torch.stack(scored, dim=1)
        if not bool(torch.isfinite(scores).all()):
            raise RuntimeError("the policy's logits are not finite: its weights have diverged")
        tokens = torch.stack(sampled, dim=1).tolist()
        routes = [*torch.cat(routed, dim=1).cpu()] if routed else [None] * len(rows)
        for row, row_tokens, row_log_probs, row_routes in zip(rows, tokens, scores.tolist(), routes, strict=True):
            row.add(row_tokens, row_log_probs, row_routes)
        report_tokens(scores.numel())


class NativeCopy(NativeEngine):
    """Generates with `policy`, a model of its own, whose weights are overwritten after every update of the actor's."""

    weight_mode: WeightMode = "copied"

    def __init__(self, policy: PolicyModel, **settings: Any) -> None:
        super().__init__(policy.requires_grad_(False).hf, **settings)
        self._weights = dict(plain_weights(policy, policy.state_dict().items()))
        self.weights_version = None

    @torch.no_grad()
    def sync_weights(self, weights: Iterable[tuple[str, Tensor]] | None = None, *, version: int) -> None:
        """Copy `weights`, unsharded and under the names of the Hugging Face model."""
        if weights is None:
            raise ValueError("this engine has a model of its own: it must be given the policy's weights")
        self.weights_version = self.weights_checksum = None
        for name, tensor in weights:
            self._weights[name].copy_(tensor)
        self.weights_checksum = int(torch.stack([checksum(tensor) for tensor in self._weights.values()]).sum())
        self.weights_version = version


def _stop_table(rows: Sequence[Row], device: torch.device) -> Tensor:
    """The tokens with which each row may end, int64 [B, most], padded with -1."""
    ends = [row.stop_ids.union(stop.candidates if (stop := row.request.params.stop) else ()) for row in rows]
    most = max(map(len, ends))
    return torch.tensor([sorted(ids) + [-1] * (most - len(ids)) for ids in ends], dtype=torch.long, device=device)


def _remove(rows: list[Row], slot: int, cache: SlotCache) -> Row:
    """Take a row out; the last row takes its slot, and the last prompt the number of one that no row continues."""
    row, last = rows[slot], rows.pop()
    if slot < len(rows):
        cache.own.move(len(rows), slot, last.columns)
        rows[slot] = last
    if cache.shared and all(other.prompt != row.prompt for other in rows):
        moved = cache.drop_prompt(row.prompt)
        for other in rows:
            if other.prompt == moved:
                other.prompt = row.prompt
    return row


def _padded_batches(groups: list[Group]) -> Iterable[list[Group]]:
    """Consecutive groups, longest prompt first, whose padded prompts hold at most MAX_TOKENS tokens (or one group).

    A batch that is large enough to keep the processor busy is closed rather than padded much.
    """
    batch: list[Group] = []
    for group in groups:
        width = len(batch[0].prompt_ids) if batch else 0
        padding = sum(width - len(g.prompt_ids) for g in [*batch, group])
        wasteful = width * len(batch) >= ENOUGH_TOKENS and padding > MAX_PADDING * width * (len(batch) + 1)
        if batch and (width * (len(batch) + 1) > MAX_TOKENS or wasteful):
            yield batch
            batch = []
        batch.append(group)
    if batch:
        yield batch
