"""Chaos over real processes: transfers and weight pushes while processes are killed and frozen,
sockets are reset and disks are full. Every promise of the engine is checked after every round.

``python -m tests.chaos --rounds 1000 --seed 7 --transport tcp,shm``
"""
