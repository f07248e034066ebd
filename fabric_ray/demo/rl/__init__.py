"""Asynchronous reinforcement learning: rollouts generate while trainers learn and push weights."""
