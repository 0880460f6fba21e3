"""`Recording` (the result of `rollout_data.open`), its `Episode` objects, and field statistics."""
