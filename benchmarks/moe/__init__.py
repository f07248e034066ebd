"""Expert parallelism: dispatch and combine beside what torch has, and beside copies."""
