"""Rows in fixed memory, and the valid windows over them; the only place that wraps indices."""
