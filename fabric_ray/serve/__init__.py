"""Ray Serve deployments of disaggregated inference."""
