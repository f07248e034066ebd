"""What this machine can and can't do, and why: libraries, NICs, limits, and bytes sent; and
whether two hosts reach each other."""

from fabric_ray.doctor.examine import examine
from fabric_ray.doctor.findings import Finding, Report, Speed, Status
from fabric_ray.doctor.host import Host
from fabric_ray.doctor.visit import visit

__all__ = ["Finding", "Host", "Report", "Speed", "Status", "examine", "visit"]
