"""Workers of vLLM's engine interface, each a process, with a small model."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import ParallelConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from fabric_ray.integrations.vllm_kv_content import weights
from fabric_ray.integrations.vllm_plugin import register
from tests.processes import Other


class Model(torch.nn.Module):
    """Loads what it is given, as vLLM's models do; may keep it beyond the call."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, torch.Tensor] = {}
        self.dies_at = ""

    def load_weights(self, weights: Any) -> set[str]:
        for name, tensor in weights:
            if name == self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.loaded[name] = tensor
        return set(self.loaded)


def model(step: int) -> torch.nn.Module:
    """What the trainer holds."""
    torch.manual_seed(step)
    return torch.nn.Sequential(
        *(torch.nn.Linear(300, 40, dtype=torch.bfloat16) for _ in range(6)),
        torch.nn.Embedding(1000, 300),
    )


def worker(connection: Connection) -> None:
    """Does what a vLLM worker does when its control plane calls."""
    torch.set_num_threads(1)
    register()
    loads = Model()
    engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="fabric"),
        SimpleNamespace(
            parallel_config=ParallelConfig(),
            model_config=SimpleNamespace(dtype=torch.bfloat16),
            kv_transfer_config=None,
            ec_transfer_config=None,
        ),
        torch.device("cpu"),
        loads,
    )
    connection.send("ready")
    while True:
        what, given = connection.recv()
        try:
            if what == "init":
                engine.init_transfer_engine(engine.parse_init_info(given))
            elif what == "update":
                loads.loaded = {}
                engine.receive_weights(engine.parse_update_info(given))
            elif what == "die at":
                loads.dies_at = given
            elif what == "fingerprint":
                connection.send(weights())
                continue
            elif what == "wrong":
                sent = dict(model(given).named_parameters())
                assert list(loads.loaded) == list(sent)
                wrong = [name for name in sent if not torch.equal(loads.loaded[name], sent[name])]
                connection.send(wrong)
                continue
            connection.send(None)
        except Exception as error:
            connection.send(RuntimeError(str(error)))


def _hear(each: Other) -> Any:
    try:
        return each.hear(60.0)
    except Exception as error:
        return error


class Client:
    """vLLM's control plane, over pipes: calls that every worker answers, or none does; those
    around an update are noted."""

    def __init__(self, workers: list[Other]) -> None:
        self._workers = workers
        self.calls: list[str] = []
        self._answers: Future[list[Any]] = Future()

    def answers(self) -> list[Any]:
        """What workers said to the last call, which a trainer that failed hasn't waited for."""
        return self._answers.result(60.0)

    def _ask(self, what: str, given: Any = None) -> None:
        self.calls.append(what)
        self._answers = Future()
        for each in self._workers:
            each.say((what, given))
        with ThreadPoolExecutor(len(self._workers)) as pool:
            said = list(pool.map(_hear, self._workers))
        self._answers.set_result(said)
        for answer in said:
            if answer is not None:
                raise answer

    def is_paused(self) -> bool:
        return self.calls[-1:] == ["pause"]

    def pause_generation(self, mode: str) -> None:
        self.calls.append("pause")

    def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        self.calls.append("reset")
        return True

    def reset_encoder_cache(self) -> None:
        pass

    def resume_generation(self) -> None:
        self.calls.append("resume")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._ask("init", init_info)

    def start_weight_update(self) -> None:
        self._ask("start")

    def update_weights(self, update_info: Any) -> None:
        self._ask("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._ask("finish")
