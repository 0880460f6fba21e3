"""`Recording` and `Episode`: what `rollout_data.open` returns, and statistics of fields."""
