"""`python -m benchmarks.rails`: rails that differ, slow down, die and return, by each policy.

The engine is the real one; the network is its simulator, so that time is virtual and the figures
are the same on every machine. `fabric-perf rails run` carries the scenarios out.
"""
