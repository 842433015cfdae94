"""Running a model safely: copies, a sandbox, observation, batches, processes."""
