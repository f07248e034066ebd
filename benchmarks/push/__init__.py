"""A model's weights from FSDP trainers into tensor-parallel rollouts, beside other ways in use.

``python -m benchmarks.push``: real actors on one Ray; every way moves the same tensors from the
same trainers into the same layout at the same rollouts, turn by turn, and all bytes are compared.
"""
