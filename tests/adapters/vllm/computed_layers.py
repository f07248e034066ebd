"""Updates the weights of layers of vLLM that have computed something of them in their first step,
and prints what is old then: ``python computed_layers.py``, under the Python of the servers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from types import SimpleNamespace

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.rotary_embedding.fope import FourierRotaryEmbedding
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from fabric_ray.integrations.vllm_reload import Reload


class Gates(torch.nn.Module):
    """A runner's gates, which it puts together."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(8, 4, bias=False)
        self.shared_expert_gate = torch.nn.Linear(8, 1, bias=False)
        self._combined_gate_weight: torch.Tensor | None = None

    step = MoERunner._maybe_fuse_gate_weights


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = Gates()
        self.rotary = FourierRotaryEmbedding(
            head_size=16,
            rotary_dim=16,
            max_position_embeddings=32,
            base=10000,
            is_neox_style=True,
            dtype=torch.float32,
            init_cache=False,
            num_key_value_heads=2,
            num_inv_freq=8,
            fope_sep_head=True,
            fope_init_factor=0.1,
        )
        self.requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.named_parameters())
        for name, tensor in weights:
            getattr(own[name], "weight_loader", default_weight_loader)(own[name], tensor)

    def step(self) -> dict[str, torch.Tensor]:
        """What layers compute with that is no weight."""
        self.gates.step()
        self.rotary.forward_native(torch.arange(4), torch.ones(4, 32), torch.ones(4, 32))
        combined = self.gates._combined_gate_weight
        assert combined is not None
        return {"gates": combined, "rotary": self.rotary.cos_sin_cache}


def main() -> None:
    torch.manual_seed(0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with set_current_vllm_config(VllmConfig()):
        address = f"tcp://127.0.0.1:{port}"
        parallel_state.init_distributed_environment(1, 0, address, 0, backend="gloo")
        parallel_state.initialize_model_parallel(1)
        model, fresh = Model(), Model()
        record_metadata_for_reloading(model)
        weights = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
        model.load_weights((name, torch.randn(p.shape)) for name, p in weights.items())
        with torch.inference_mode():  # as vLLM's workers
            before = model.step()
        addresses = {name: tensor.data_ptr() for name, tensor in before.items()}
        reload = Reload(model, SimpleNamespace(dtype=torch.float32))
        reload.load(weights.items())
        reload.finish()
        after = model.step()
        fresh.load_weights(weights.items())
        expected = fresh.step()
    old = [name for name in expected if not torch.equal(after[name], expected[name])]
    moved = [name for name in expected if after[name].data_ptr() != addresses[name]]
    print(json.dumps({"old": old, "moved": moved}))


if __name__ == "__main__":
    main()
