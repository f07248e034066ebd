"""The main jobs, run for real on whatever machine there is: what ``fabric-ray demo`` shows."""
