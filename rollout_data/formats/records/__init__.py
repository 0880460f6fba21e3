"""Formats that are records one after the other: TFRecord, MCAP."""
