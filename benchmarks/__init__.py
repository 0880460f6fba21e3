"""Time and memory of the library, compared with a limit and with peers.

`harness.py` shows a minimal workload.
"""
