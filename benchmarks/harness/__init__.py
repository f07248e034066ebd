"""What all suites share: cases, paired turns, statistics, results and the report."""
