"""What the library costs, beside the cheapest possible way and beside the peers. Start with `harness.py`."""
