"""Chaos for the transfer of KV pages: decoders and prefillers in processes of their own, whose
requests are cancelled, late or given up while processes are killed and stopped.

``python -m tests.chaos --kv --rounds 1000 --seed 7 --transport tcp,shm``
"""
