"""Benchmarks that print the physical floor and every installed peer beside our own figure."""
