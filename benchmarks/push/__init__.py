"""A model's weights from FSDP trainers into tensor-parallel rollouts, beside what else is in use.

``python -m benchmarks.push``: real actors on one Ray; every contender moves the same tensors from
the same trainers into the same layout at the same rollouts, turn by turn; all bytes are compared.
"""
