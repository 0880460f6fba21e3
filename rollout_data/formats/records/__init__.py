"""Formats of consecutive records in a file: TFRecord and MCAP."""
