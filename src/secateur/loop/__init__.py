"""The pruning loop: prune, schedule, checkpoints, fine-tuning, comparison."""
