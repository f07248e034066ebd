"""What this machine can and can't do, and why: libraries, NICs, limits, and bytes sent."""

from fabric_ray.doctor.examine import examine
from fabric_ray.doctor.findings import Finding, Report, Status

__all__ = ["Finding", "Report", "Status", "examine"]
