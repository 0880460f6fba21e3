"""One HTML page about a recording: its data, the doctor's findings, its episodes."""
