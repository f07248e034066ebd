"""What this machine moves between two processes, beside what plain code does with the same bytes.

``python -m benchmarks run`` in a clone measures more, beside other libraries; this comes with the
package.
"""

from __future__ import annotations

from fabric_ray.bench.figures import PING_NBYTES, Figure, Report
from fabric_ray.bench.measure import SIZES, TURNS, measure

__all__ = ["PING_NBYTES", "SIZES", "TURNS", "Figure", "Report", "measure"]
