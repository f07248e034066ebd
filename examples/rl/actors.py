"""Ray actors: trainers with shards of the policy by FSDP2, and rollouts by vLLM."""

from __future__ import annotations

import asyncio
import itertools
import math
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import ray
import task
import torch
import torch.distributed as dist
from task import Samples
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from transformers import AutoModelForCausalLM
from vllm import CompletionOutput, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import RayVLLMWeightSyncClient, WeightTransferTrainerFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor

from fabric_ray.integrations.vllm import FabricTrainerInitInfo
from fabric_ray.integrations.vllm_plugin import register


class Options(NamedTuple):
    """What actors and the loop agree on."""

    steps: int
    staleness: int
    trainers: int
    rollouts: int
    seed: int
    digits: int = 6
    prompts: int = 16
    """Number of prompts of a batch, which a rollout draws at once."""
    group: int = 8
    """Number of samples of each prompt."""
    batches: int = 2
    """Number of batches that each trainer takes for an update."""
    lr: float = 3e-3
    clip: float = 0.2


class Pushed(NamedTuple):
    """One push, as rank 0 saw it."""

    nbytes: int
    seconds: float


class Trainer:
    """One rank."""

    def __init__(self, rank: int, options: Options) -> None:
        self._rank, self._options = rank, options
        torch.set_num_threads(1)
        # Whole weights of versions that samples may still come from, the oldest first.
        self._pushed: dict[int, dict[str, Tensor]] = {}

    def serve(self) -> tuple[str, int]:
        """Opens the store where the ranks of ``torch.distributed`` meet, at rank 0."""
        host, world = ray.util.get_node_ip_address(), self._options.trainers
        self._store = dist.TCPStore(host, 0, world, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def start(self, store: tuple[str, int], rollouts: list[Any]) -> None:
        """Joins the other ranks, shards the policy and connects it to the rollouts."""
        options = self._options
        with tempfile.TemporaryDirectory() as folder:
            task.write_model(Path(folder), options.seed)
            self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            self._whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        world = options.trainers
        met = dist.TCPStore(*store, world) if self._rank else self._store
        dist.init_process_group("gloo", store=met, rank=self._rank, world_size=world)
        mesh = init_device_mesh("cpu", (options.trainers,))
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.Adam(
            self._model.parameters(), lr=options.lr, betas=(0.9, 0.95), foreach=False
        )
        register()
        self._sender = WeightTransferTrainerFactory.trainer_init(
            FabricTrainerInitInfo(rank=self._rank, workers=options.rollouts),
            client=RayVLLMWeightSyncClient(rollouts),
            source=self._model,
        )

    def push(self, version: int) -> Pushed:
        """Has all rollouts go on with these weights, in the middle of their requests."""
        start = time.perf_counter()
        self._sender.send_weights(str(version))
        seconds = time.perf_counter() - start
        self._pushed[version] = {
            name: parameter.full_tensor().detach().clone()
            for name, parameter in self._model.named_parameters()
        }
        for old in [v for v in self._pushed if v < version - self._options.staleness]:
            del self._pushed[old]
        report = self._sender.report
        return Pushed(report.nbytes if report else 0, seconds)

    def update(self, batches: list[Samples]) -> float:
        """Learns from this rank's samples; the other ranks must learn from theirs.

        Returns:
            The largest difference between a rollout's log-probability of a token, and that by the
            weights that were pushed to it under the version which drew the token.
        """
        options, drawn = self._options, Samples(*map(torch.cat, zip(*batches, strict=True)))
        mismatch = self._mismatch(drawn)
        self._optimizer.zero_grad(set_to_none=True)
        new = task.logprobs(lambda tokens: self._model(tokens).logits, drawn.tokens, options.digits)
        advantage = task.advantages(drawn.rewards, options.group)
        task.objective(new, drawn.logprobs, advantage, options.clip).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0, foreach=False)
        self._optimizer.step()
        return mismatch

    @torch.no_grad()
    def _mismatch(self, drawn: Samples) -> float:
        worst = 0.0
        for version in drawn.versions.unique().tolist():
            weights = self._pushed[version]

            def logits(tokens: Tensor, weights: dict[str, Tensor] = weights) -> Tensor:
                return functional_call(self._whole, weights, (tokens,)).logits

            again = task.logprobs(logits, drawn.tokens, self._options.digits)
            difference = (again - drawn.logprobs).abs()[drawn.versions == version]
            worst = max(worst, difference.nan_to_num(nan=math.inf).max().item())
        return worst


class Rollout(AsyncLLM):
    """vLLM's engine as a Ray actor. Its methods that a weight update calls are vLLM's own."""

    def __init__(self, rank: int, options: Options) -> None:
        self._options = options
        self._random = torch.Generator().manual_seed(options.seed * 1000 + rank)
        self._numbers = itertools.count()
        with tempfile.TemporaryDirectory() as folder:
            task.write_model(Path(folder), options.seed)
            config = AsyncEngineArgs(
                model=folder,
                dtype="float32",
                max_model_len=256,
                enforce_eager=True,
                distributed_executor_backend="uni",
                seed=options.seed * 1000 + rank,
                weight_transfer_config=WeightTransferConfig(backend="fabric"),
            ).create_engine_config()
            super().__init__(
                vllm_config=config,
                executor_class=Executor.get_class(config),
                log_stats=False,
                log_requests=False,
            )

    async def draw(self) -> Samples:
        """A batch, each token by the weights that are in use when it is drawn."""
        options = self._options
        asked = task.prompts(options.prompts, options.digits, self._random)
        answers = await asyncio.gather(*map(self._answers, asked.tolist()))
        tokens, logprobs, versions = map(torch.tensor, zip(*itertools.chain(*answers), strict=True))
        tokens = torch.cat([asked.repeat_interleave(options.group, dim=0), tokens], dim=1)
        return Samples(tokens, logprobs, versions, task.rewards(tokens))

    async def _answers(self, prompt: list[int]) -> list[tuple[list[int], list[float], list[int]]]:
        """Of one prompt: tokens, their log-probabilities, and their versions."""
        length = self._options.digits
        sampling = SamplingParams(
            n=self._options.group,
            max_tokens=length,
            ignore_eos=True,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        name = f"prompt-{next(self._numbers)}"
        given = self.generate({"prompt_token_ids": prompt}, sampling, name)
        [final] = [output async for output in given]
        return [_drawn(answer) for answer in final.outputs]


def _drawn(answer: CompletionOutput) -> tuple[list[int], list[float], list[int]]:
    """Tokens, their log-probabilities, and their versions."""
    tokens = list(answer.token_ids)
    logprobs = [at[token].logprob for at, token in zip(answer.logprobs, tokens, strict=True)]
    spans = answer.weight_versions
    versions = [int(span.version) for span in spans for _ in range(span.start, span.end)]
    return tokens, logprobs, versions
